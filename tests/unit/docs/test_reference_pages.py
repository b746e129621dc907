"""Every public name of the packages has its docstring in the reference, and every name there exists."""

import ast
import enum
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "thinwire"
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)$", re.MULTILINE)
MODULES = ("adapters.fsdp2", "checkpoint", "planner.costs")  # public without being packages


def exports(path):
    """``__all__`` of a file, without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []


def packages():
    """(dotted name, exported names) of every package, and of ``MODULES``."""
    paths = [*SOURCE.rglob("__init__.py"), *(SOURCE / f"{name.replace('.', '/')}.py" for name in MODULES)]
    for path in sorted(paths):
        parts = ("thinwire", *path.relative_to(SOURCE).with_suffix("").parts)
        if names := exports(path):
            yield ".".join(parts).removesuffix(".__init__"), names


PACKAGES = dict(packages())


def resolve(name):
    """The object of a dotted name."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.fixture(scope="module")
def documented():
    """Dotted names that some page shows."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
    names = [name for page in pages for _, name in DIRECTIVE.findall(page.read_text())]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)
    return set(names)


def is_shown(full, documented):
    """Under this name, or under that of the file it comes from; a member of an enum with its class."""
    if full in documented or any(name.startswith(f"{full}.") for name in documented):
        return True
    found = resolve(full)
    last = full.rpartition(".")[2]
    if isinstance(found, enum.Enum):
        found, last = type(found), type(found).__name__
    return any(resolve(name) is found for name in documented if name.endswith(f".{last}"))


def test_the_packages_are_found():
    assert {"thinwire", "thinwire.program", "thinwire.kfac", "thinwire.split.codecs", "thinwire.checkpoint"} <= set(
        PACKAGES
    )
    assert len(PACKAGES["thinwire"]) > 25


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package, documented):
    missing = [name for name in PACKAGES[package] if not is_shown(f"{package}.{name}", documented)]
    assert not missing, f"docs/api.md shows nothing of {package}: {', '.join(missing)}"


def test_what_the_first_page_of_the_reference_names_is_public():
    page = (ROOT / "docs" / "api.md").read_text()
    for name in PACKAGES["thinwire"]:
        assert re.search(rf"\b{name}\b", page), f"docs/api.md does not name {name}"
