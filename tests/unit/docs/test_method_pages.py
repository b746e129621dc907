"""Every method has its page, with its program from the source and predictions that the planner still makes."""

import ast
import json
import re
from pathlib import Path

import pytest
import when_it_pays

from thinwire.core.methods.registry import METHODS
from thinwire.tools.cli.main import app
from verbs import CliRunner

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "methods"
LITERAL = re.compile(r"^```\{literalinclude\} (\S+)\n:pyobject: (\S+)$", re.MULTILINE)
HEADINGS = ("## The program", "## Turn it on", "## Differences from", "## When it pays")


def objects(tree, prefix=""):
    """Qualified names of all functions and classes."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from objects(node, f"{prefix}{node.name}.")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page(name):
    page, index = (FOLDER / f"{name}.md").read_text(), (FOLDER / "index.md").read_text()
    places = [page.index(f"\n{heading}") for heading in HEADINGS]
    assert places == sorted(places)
    assert page.startswith(f"# {name}: ")
    assert page.count("<!-- tested -->") == 1
    assert f'"{name}"' in page[places[1] : places[2]]
    assert page.count(f"```{{include}} when/{name}.md\n```") == 1
    assert f"\n{name}\n" in index[index.index("{toctree}") :]
    assert f"({name}.md)" in index
    assert f'| `"{name}"`' in index


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
    entries = json.loads(CliRunner().invoke(app, words.split()).stdout)["ranking"]["entries"]
    step = {e["label"]: e["step_seconds"] for e in entries}
    ratio = step["ssgd"] / step["acp:rank=4"]
    assert said(when_it_pays, "acp", "acp:rank=4", "resnet50", "1gbit", 16) == when_it_pays.figure(ratio)
