"""examples/stereo: what its network is compared with."""

import importlib.util
from pathlib import Path

import pytest
import torch

from thinwire.systems.supernet.stereo import measure, random_dot_pair

pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")
EXAMPLE = Path(__file__).parents[3] / "examples" / "stereo"


@pytest.fixture(scope="module")
def baseline():
    spec = importlib.util.spec_from_file_location("baseline", EXAMPLE / "baseline.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def motorcycle(baseline):
    pytest.importorskip("skimage")
    return baseline.middlebury_motorcycle()


def test_block_matching_finds_whole_shifts(baseline):
    left, right, d = random_dot_pair(1, 24, 48, 9, torch.Generator().manual_seed(0))
    found, known = baseline.box_match(left[0], right[0], 12, window=3), d[0].isfinite()
    assert (found == d[0])[known].float().mean() > 0.8
    assert torch.equal(baseline.box_match(left[0], left[0], 12), torch.zeros(24, 48))


def test_block_matching_on_the_motorcycle(baseline, motorcycle):
    left, right, d = motorcycle
    score = measure(baseline.box_match(left, right, 64)[None], d[None], 192)
    assert score.epe == pytest.approx(4.46, abs=0.1)
    assert score.bad3 == pytest.approx(0.245, abs=0.01)
