"""Tests ask for what a caller can see: none reads, sets or imports a private name of thinwire's."""

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]

# Of other libraries; what is tested beside them has no other way in.
LIBRARIES = {
    "os and sys": {"_exit", "_getframe"},
    "torch, its modules and extension": {"_C", "_dynamo", "_nn", "_parse_to", "_disabled_torch_function_impl"},
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

# How many are left. It only ever gets smaller: ask for something observable, and lower the number.
LEFT = {
    "dist/parameter_cluster.py": 2,
    "dist/test_engine.py": 4,
    "dist/test_fsdp2.py": 3,
    "dist/test_mesh.py": 1,
    "dist/test_parameter_server.py": 14,
    "dist/test_parameter_server_kills.py": 1,
    "dist/test_parameter_server_shards.py": 17,
    "simcuda/wrapped.py": 2,
    "unit/federated/test_fed_compress.py": 1,
    "unit/parameter_server/test_shard_pieces.py": 1,
    "unit/program/test_local_fields.py": 1,
    "unit/report/test_step_log.py": 2,
}


def private(name):
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__") and name not in ALLOWED


def found(tree):
    """Every such access: the line, and what is asked for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
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
    counts, said = Counter(), []
    for path in sorted(TESTS.rglob("*.py")):
        file = path.relative_to(TESTS).as_posix()
        for line, what in found(ast.parse(path.read_text())):
            counts[file] += 1
            said.append(f"{file}:{line} {what}")
    assert dict(counts) == LEFT, "\n".join(said)


def test_the_check_sees_each_way_in():
    text = """
from thinwire.a import _b
from thinwire._a import b
sync._session.comm
monkeypatch.setattr(module, "_name", 1)
super()._grad()
self._mine, module.__name__, _, os._exit
"""
    assert [line for line, _ in sorted(found(ast.parse(text)))] == [2, 3, 4, 5, 6]
