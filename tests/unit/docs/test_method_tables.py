"""The tables of methods are made from the registry and the words of each page."""

import ast
import json
import re
import shutil
from pathlib import Path

import method_tables
import pytest
import when_it_pays
import winners

from thinwire.core.methods.registry import METHODS
from verbs import call

INDEX = method_tables.FOLDER / "index.md"


def test_the_index_is_what_the_script_writes():
    page = INDEX.read_text()
    assert page == method_tables.rendered(page), "run: python docs/method_tables.py"
    first, second = (re.findall(rf"^\| {start}`\"?(\w+)", page, re.MULTILINE) for start in (r"\[", ""))
    assert first == second
    assert list(dict.fromkeys(first)) == list(METHODS)


def test_a_page_without_words_is_named(tmp_path):
    shutil.copytree(method_tables.FOLDER, tmp_path / "methods")
    page = tmp_path / "methods" / "acp.md"
    page.write_text(page.read_text().partition("<!-- in the index")[0])
    with pytest.raises(ValueError, match=r"acp\.md has no comment 'in the index'"):
        method_tables.rows(tmp_path / "methods")


ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "methods"
LITERAL = re.compile(r"^```\{literalinclude\} (\S+)\n:pyobject: (\S+)$", re.MULTILINE)


def objects(tree, prefix=""):
    """Qualified names of all functions and classes."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from objects(node, f"{prefix}{node.name}.")


def test_programs_are_those_of_the_source():
    for page in FOLDER.glob("*.md"):
        text = page.read_text()
        found = LITERAL.findall(text)
        assert len(found) == text.count("{literalinclude}"), page.name
        assert found or page.stem == "index"
        for path, name in found:
            source = (page.parent / path).resolve()
            assert name in objects(ast.parse(source.read_text())), f"{page.name} shows {name} of {source}"


def said(script, page, label, model, link, workers):
    """What the committed table says."""
    rows = iter((script.FOLDER / f"{page}.md").read_text().splitlines())
    assert any(row.startswith(f"| `{label}` |") for row in rows), f"no table of {label}"
    row = next(row for row in rows if row.startswith(f"| {link} |"))
    place = script.MODELS.index(model) * len(script.WORKERS) + script.WORKERS.index(workers)
    return row.split("|")[2 + place].strip()


def test_a_cell_is_what_the_command_says():
    words = "plan resnet50 --link 1gbit --workers 16 --methods ssgd,acp:rank=4 --json"
    entries = json.loads(call(*words.split()).stdout)["ranking"]["entries"]
    step = {e["label"]: e["step_seconds"] for e in entries}
    ratio = step["ssgd"] / step["acp:rank=4"]
    assert said(when_it_pays, "acp", "acp:rank=4", "resnet50", "1gbit", 16) == when_it_pays.figure(ratio)


@pytest.mark.parametrize("model", winners.MODELS)
def test_who_wins_where(model):
    assert (winners.FOLDER / f"{model}.md").read_text() == winners.table(model), "run: python docs/winners.py"


@pytest.mark.parametrize("page", when_it_pays.LABELS)
def test_when_a_method_pays(page):
    told = (when_it_pays.FOLDER / f"{page}.md").read_text()
    assert told == when_it_pays.fragment(page), "run: python docs/when_it_pays.py"
