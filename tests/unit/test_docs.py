"""Runs what the documentation shows: Python blocks under ``<!-- tested -->``, doctests."""

import doctest
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from thinwire.core.program import LocalWorld

ROOT = Path(__file__).parents[2]
FILES = [p for p in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in p.parts]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *FILES]
TESTED = re.compile(r"^<!-- tested -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """(line number, code) of every tested block."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(1)), found[1]) for found in TESTED.finditer(text)]


def execute(page, monkeypatch):
    """Run a page's tested blocks in order, in one module; returns what they defined."""
    module = types.ModuleType(f"blocks_of_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    for line, code in blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), module.__dict__)
    return module


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A folder to write in, no torchrun around, no words behind the script's name."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, alone, monkeypatch):
    codes = [code for _, code in blocks(page)]
    if any("num_workers" in code for code in codes):  # forks are of a script's own process, not of all tests' before
        run = subprocess.run([sys.executable, "-c", "\n".join(codes)], capture_output=True, text=True, timeout=500)
        assert run.returncode == 0, run.stderr
    else:
        execute(page, monkeypatch)


def test_no_marker_is_without_a_block():
    for page in PAGES:
        marks = len(re.findall(r"^<!-- tested -->$", page.read_text(), re.MULTILINE))
        assert marks == len(blocks(page)), f"{page.name}: a tested marker without a python block right under it"
    assert len(blocks(ROOT / "CONTRIBUTING.md")) == 2


def test_example_method_rejects_a_step_whole(alone, monkeypatch):
    world = LocalWorld(3, plan=[["a"], ["b"]])
    method = execute(ROOT / "CONTRIBUTING.md", monkeypatch).RandomK(density=0.25)
    draw = torch.Generator().manual_seed(0)
    good = [{k: torch.randn(40, generator=draw) for k in "ab"} for _ in range(3)]
    world.step(method, good)
    before = world.residuals()
    bad = [{k: v.clone() for k, v in g.items()} for g in good]
    for i in range(12):  # wherever it is, sent or not
        bad[1]["b"] = good[1]["b"].clone()
        bad[1]["b"][i] = float("inf")
        applied = world.step(method, bad)
        assert all(r["b"].isnan().any() and r["a"].isfinite().all() for r in applied)
        for old, new in zip(before, world.residuals(), strict=True):
            assert all(torch.equal(old[k], new[k]) for k in "ab")


EXAMPLES = [p for p in sorted((ROOT / "src").rglob("*.py")) if re.search(r"^ *>>> ", p.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_doctests(path):
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    result = doctest.testmod(importlib.import_module(".".join(parts)))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("marker", ["<!-- demo-table -->", "<!-- /demo-table -->"])
def test_readme_has_the_place_of_the_results(marker):
    assert (ROOT / "README.md").read_text().count(marker) == 1
