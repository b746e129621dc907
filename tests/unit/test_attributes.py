"""What a handle shows its users."""

import ast
import inspect

import pytest

import thinwire
from thinwire.adapters.ddp import DDPSync
from thinwire.adapters.fsdp2_replicas import ReplicaSync

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


@pytest.mark.parametrize("handle", [thinwire.GradientSync, thinwire.LocalSync, ReplicaSync, DDPSync])
def test_a_handle_shows_its_users_few_names(handle):
    set_on_self = attributes(ast.parse(inspect.getsource(handle)).body[0])
    names = {name for name in {*dir(handle), *set_on_self} if not name.startswith("_")}
    assert len(names) <= MOST, sorted(names)
