"""A new method is one file, one line of the registry and one section of a page: everything else finds it."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire.adapters.fsdp2 import works
from thinwire.core.methods.registry import METHODS, lossy_candidates
from thinwire.core.program import LocalWorld
from thinwire.tools.bench.rows import parse_rows
from verbs import call

ROOT = Path(__file__).parents[2]
SOURCE = '''"""Halved: the average of gradients that are rounded to bf16 and sent as such; no paper."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from thinwire.core.methods.base import check_fusion
from thinwire.core.methods.prices import Prices, elements
from thinwire.core.program import AllReduce, Method


@dataclass(frozen=True)
class Halved(Method):
    """Send the upper half of every number."""

    name: ClassVar[str] = "halved"
    loss: ClassVar[str] = "rounded to 8 bits or so"
    candidates: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"scale": 2.0})
    auto: ClassVar[tuple[int, tuple[dict[str, Any], ...]]] = (6, ({},))

    scale: float = 1.0
    fusion: Any = "auto"

    def __post_init__(self):
        check_fusion(self.fusion)

    def payload(self, shapes, phase):
        return [-(-size // 2) for size in super().payload(shapes, phase)]

    def compute_seconds(self, shapes, phase, topology, costs):
        prices = Prices(costs, topology.world_size)
        return [prices.passes(2.0, elements(shapes)), prices.passes(1.0, elements(shapes))]

    def reduce(self, bucket, state):
        total = yield AllReduce((bucket.gradient() / state.size * self.scale).to(torch.bfloat16))
        bucket.write_gradient(total.to(bucket.dtype) / self.scale)
'''
PAGE = """# Tests

## halved

<!-- in the index
method: halved
when: where nobody looks
-->
"""


@pytest.fixture
def script(monkeypatch):
    """A script of docs/ or tests/, as a module of this test."""

    def load(path):
        spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Halved in a package of its own, its line and its page. Returns the folder of pages."""
    package = tmp_path / "extra_methods"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "halved.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(METHODS, "halved", "extra_methods.halved:Halved")
    folder = shutil.copytree(ROOT / "docs" / "methods", tmp_path / "methods")
    (folder / "tests.md").write_text(PAGE)
    yield folder
    for name in ("extra_methods", "extra_methods.halved"):
        sys.modules.pop(name, None)
    vars(tw).pop("Halved", None)


def test_it_has_names_and_is_priced_last(pages):
    assert tw.method("halved", scale=2.0) == tw.Halved(scale=2.0)
    with pytest.raises(ValueError, match="did you mean 'scale'"):
        tw.method("halved", scal=2.0)
    assert "halved" in works()
    assert lossy_candidates()[-1] == ("halved", {})
    (row,) = parse_rows("halved:scale=4.0")
    assert (row.is_thinwire, row.kind, row.options) == (True, "halved", {"scale": 4.0})


def test_it_runs(pages):
    gradients = [{"w": torch.full((3, 2), float(rank))} for rank in range(4)]
    world = LocalWorld(4)
    for result in world.step(tw.method("halved"), gradients):
        assert torch.equal(result["w"], torch.full((3, 2), 1.5))
    assert world.bytes_sent() == [2 * 3 * 2 * 6 // 4] * 4
    model = torch.nn.Linear(4, 2)
    with tw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "halved", scale=2.0) as sync:
        model(torch.ones(1, 4)).sum().backward()
        assert "halved runs as ssgd" in sync.stats().note


def test_plan_ranks_it(pages):
    words = "plan resnet50 --link 1gbit --workers 8 --json"
    entries = json.loads(call(*words.split()).stdout)["ranking"]["entries"]
    found = {entry["label"]: entry for entry in entries}
    assert {"halved", "halved:scale=2.0"} <= set(found)
    assert found["halved"]["bytes_sent"] * 2 == pytest.approx(found["ssgd"]["bytes_sent"], rel=1e-3)


def test_the_docs_list_it(pages, script):
    row = "| [`halved`](tests.md#halved) | rounded to 8 bits or so | 32.61 | where nobody looks |"
    assert row in script("docs/method_tables.py").table(pages).splitlines()


def test_a_trajectory_is_asked_of_it(pages, script):
    regenerate = script("tests/golden/regenerate.py")
    assert regenerate.cases()["halved"] == ("halved", {})
    found, plain = regenerate.trajectory("halved"), regenerate.trajectory("ssgd")
    assert found["loss"] == pytest.approx(plain["loss"], rel=0.05)
    assert found["loss"] != plain["loss"]
    assert not regenerate.path("halved").exists()
