"""Classes of the engine and the adapters stay small: what has many attributes is several things."""

import ast
import inspect
from pathlib import Path

import pytest

import thinwire
from thinwire.adapters.ddp import DDPSync
from thinwire.adapters.fsdp2_replicas import ReplicaSync

MOST = 12
PACKAGE = Path(thinwire.__file__).parent


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


def test_no_class_of_engine_and_adapters_has_more_than_twelve_attributes():
    found = {
        f"{path.relative_to(PACKAGE)}: {node.name}": len(attributes(node))
        for package in ("engine", "adapters")
        for path in sorted((PACKAGE / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert len(found) > 50
    assert not {name: count for name, count in found.items() if count > MOST}


@pytest.mark.parametrize("handle", [thinwire.GradientSync, thinwire.LocalSync, ReplicaSync, DDPSync])
def test_a_handle_shows_its_users_few_names(handle):
    set_on_self = attributes(ast.parse(inspect.getsource(handle)).body[0])
    names = {name for name in {*dir(handle), *set_on_self} if not name.startswith("_")}
    assert len(names) <= MOST, sorted(names)
