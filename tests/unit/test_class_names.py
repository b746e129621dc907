"""A public class name stands for one thing: who searches for it finds one class."""

import ast
from collections import Counter
from pathlib import Path

import thinwire

PACKAGE = Path(thinwire.__file__).parent

NAMED_BY_FRAMEWORKS = {"ThinwireCallback"}  # Lightning's and the Trainer's, as users look for either
PARAMETER_SERVER = {"Buffers", "Codec", "Link", "Recipe", "Row", "Send"}


def public_classes():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name


def test_a_public_class_name_is_given_once():
    counts = Counter(public_classes())
    assert len(counts) > 300
    assert {name for name, count in counts.items() if count > 1} == NAMED_BY_FRAMEWORKS | PARAMETER_SERVER
