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
REFERENCE = ROOT / "docs" / "api.md"
CODE = re.compile(r"^```[^\n]*\n.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
MODULES = ("adapters.fsdp2", "engine.state.checkpoint", "core.pricing.costs")  # public without being packages


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
assert len(PACKAGES) > 15


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


def test_every_name_of_the_reference_exists(documented):
    for name in documented:
        if not name.startswith("thinwire.adapters."):  # which need their frameworks
            resolve(name)


def is_shown(full, documented):
    """Under this name, or under that of the file it comes from; a member of an enum with its class."""
    short = re.sub(r"^thinwire\.(core|systems|tools|predict)\.", "thinwire.", full)
    if {full, short} & documented or any(name.startswith((f"{full}.", f"{short}.")) for name in documented):
        return True
    found = resolve(full)
    last = full.rpartition(".")[2]
    if isinstance(found, enum.Enum):
        found, last = type(found), type(found).__name__
    return any(resolve(name) is found for name in documented if name.endswith(f".{last}"))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package, documented):
    missing = [name for name in PACKAGES[package] if not is_shown(f"{package}.{name}", documented)]
    assert not missing, f"docs/api.md shows nothing of {package}: {', '.join(missing)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_explained(package):
    found = {name: getattr(importlib.import_module(package), name) for name in PACKAGES[package]}
    bare = [
        name for name, x in found.items() if callable(x) and x.__module__.startswith("thinwire") and not own_words(x)
    ]
    assert not bare, f"no docstring: {', '.join(bare)}"


def own_words(x):
    """A docstring, but not the one that a dataclass makes of its fields."""
    return x.__doc__ and not x.__doc__.startswith(f"{x.__name__}(")


def identifiers(text):
    """Names in a piece of Python, without what only comments and docstrings say."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")


@pytest.fixture(scope="module")
def users():
    """Who may use a name: file -> the words in its code; of a page of the documentation, in its blocks and spans."""
    paths = [p for d in ("src", "examples", "benchmarks") for p in (ROOT / d).rglob("*.py") if ".venv" not in p.parts]
    found = {p: set(identifiers(p.read_text())) for p in paths}
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
    for page in pages:
        if page != REFERENCE and "_build" not in page.parts:
            found[page] = set(re.findall(r"\w+", " ".join(CODE.findall(page.read_text()))))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_used_outside_its_package(package, users):
    """What nobody imports from elsewhere, and no page names, stays in its module. Errors are there to be caught."""
    folder, short = SOURCE.joinpath(*package.split(".")[1:]), package.rpartition(".")[2]
    own = {SOURCE / "__init__.py"} if package == "thinwire" else {folder.with_suffix(".py"), *folder.rglob("*.py")}
    seen = set().union(*(words for path, words in users.items() if path not in own and short in words))
    unused = {name for name in set(PACKAGES[package]) - seen if not is_error(importlib.import_module(package), name)}
    assert not unused, f"take out of __all__: {', '.join(sorted(unused))}"


def is_error(package, name):
    found = getattr(package, name)
    return isinstance(found, type) and issubclass(found, BaseException)


def test_the_reference_begins_with_what_users_need(documented):
    first, _, _ = REFERENCE.read_text().partition("\n## All names\n")
    listed = re.findall(r"^   (thinwire\.[\w.]+)$", first, re.MULTILINE)
    classes = [f"thinwire.{name}" for name in re.findall(r"\[`(\w+)`\]\(methods/\w+\.md(?:#\w+)?\)", first)]
    assert not DIRECTIVE.search(first)
    assert len(listed + classes) == len(set(listed + classes))
    assert 60 < len(listed + classes) < 90
    assert not set(listed) - documented, "these rows have no entry to lead to"
    assert all(resolve(name) for name in classes)
    missing = {f"thinwire.{name}" for name in PACKAGES["thinwire"]} - {*listed, *classes}
    assert not missing, f"docs/api.md does not begin with {', '.join(sorted(missing))}"
