"""What the source and its tests keep to: tests ask for what a caller can see, a name stands for one thing."""

import ast
import graphlib
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import thinwire
from thinwire.adapters.ddp import DDPSync
from thinwire.adapters.fsdp2_replicas import ReplicaSync

TESTS = Path(__file__).parents[1]
PACKAGE = Path(thinwire.__file__).parent
NAMED_TWICE = {"ThinwireCallback"}  # Lightning's and the Trainer's, as users look for either
PARAMETER_SERVER = {"Buffers", "Codec", "Link", "Recipe", "Row", "Send", "Update"}


def test_a_public_class_name_is_given_once():
    """Who searches for it finds one class."""
    texts = (path.read_text() for path in PACKAGE.rglob("*.py"))
    counts = Counter(name for text in texts for name in re.findall(r"^ *class ([A-Z]\w*)[(:]", text, re.MULTILINE))
    assert len(counts) > 300
    assert {name for name, count in counts.items() if count > 1} <= NAMED_TWICE | PARAMETER_SERVER


def test_no_two_modules_import_each_other_even_by_a_detour_or_for_a_type():
    files = {".".join(("thinwire", *p.relative_to(PACKAGE).with_suffix("").parts)): p for p in PACKAGE.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    imports = {}
    for name, path in files.items():
        froms = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom) and n.module]
        found = {
            f"{n.module}.{a.name}" if f"{n.module}.{a.name}" in files else n.module for n in froms for a in n.names
        }
        imports[name] = found & set(files) - {name}
    imports["thinwire"].clear()  # names for users, each imported when it is asked for
    assert sum(map(len, imports.values())) > 1000
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, with the circle


MOST = 12


def attributes(node: ast.ClassDef) -> set[str]:
    """What its methods assign on ``self``."""
    return {
        inside.attr
        for inside in ast.walk(node)
        if isinstance(inside, ast.Attribute)
        and isinstance(inside.ctx, ast.Store)
        and isinstance(inside.value, ast.Name)
        and inside.value.id == "self"
    }


@pytest.mark.parametrize(
    ("handle", "more"),
    [(thinwire.GradientSync, 1), (thinwire.LocalSync, 4), (ReplicaSync, 0), (DDPSync, 0)],  # join; and own pace's three
)
def test_a_handle_shows_its_users_few_names(handle, more):
    set_on_self = attributes(ast.parse(inspect.getsource(handle)).body[0])
    names = {name for name in {*dir(handle), *set_on_self} if not name.startswith("_")}
    assert len(names) <= MOST + more, sorted(names)


# Of other libraries; what is tested beside them has no other way in.
LIBRARIES = {
    "os and sys": {"_exit", "_getframe"},
    "torch, its modules and extension": {"_C", "_dynamo", "_nn", "_parse_to", "_disabled_torch_function_impl"},
    "torch's autograd, whose state hangs a rank": {"_stash_obj_in_tls"},
    "torch's tensors and operators, for the simulated card": {
        "_make_wrapper_subclass", "_cdata", "_schema", "_lazy_init",
        "_local_scalar_dense", "_unique2", "_linalg_eigh", "_linalg_svd", "_to_copy",
    },
    "torch's hooks, which are counted": {
        "_forward_hooks", "_forward_pre_hooks", "_post_accumulate_grad_hooks", "_comm_hooks",
    },
    "torch.distributed: its store, its groups, its own tests": {"_get_default_store", "_world", "_DistTestBase"},
    "FSDP2's parameter groups": {"_all_reduce_hook", "_reduce_scatter_comm"},
    "GradScaler": {"_scale", "_per_optimizer_states"},
    "accelerate, which keeps its state in classes": {"_reset_state"},
    "typer's test runner, whose built command is kept": {"_get_command"},
}  # fmt: skip
ALLOWED = set().union(*LIBRARIES.values())
SETTERS = {"setattr", "getattr", "delattr", "hasattr", "object"}  # monkeypatch's, Python's, patch.object


def private(name):
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__") and name not in ALLOWED


def own(tree):
    """What methods read and set on ``self``; a function that is put into somebody else's class has no such right."""
    for kind in ast.walk(tree):
        for node in ast.walk(kind) if isinstance(kind, ast.ClassDef) else ():
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls"):
                yield node


def found(tree):
    """Every such access: the line, and what is asked for."""
    mine = set(own(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if private(node.attr) and node not in mine:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "thinwire":
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if private(name))
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[1].value
            if called in SETTERS and isinstance(name, str) and private(name):
                yield node.lineno, ast.unparse(node)


def test_no_test_reaches_into_a_private_name():
    said = [
        f"{path.relative_to(TESTS).as_posix()}:{line} {what}"
        for path in sorted(TESTS.rglob("*.py"))
        if any(map(private, re.findall(r"\b_\w+", text := path.read_text())))
        for line, what in found(ast.parse(text))
    ]
    assert not said, "ask for something observable:\n" + "\n".join(said)


def test_the_check_sees_each_way_in():
    text = """
from thinwire.a import _b
from thinwire._a import b
sync._session.comm
monkeypatch.setattr(module, "_name", 1)
super()._grad()
Service.run = lambda self: self._listener
class Mine:
    def theirs(self): return self._mine, module.__name__, _, os._exit
"""
    assert [line for line, _ in sorted(found(ast.parse(text)))] == [2, 3, 4, 5, 6, 7]
