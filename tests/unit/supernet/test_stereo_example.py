"""examples/stereo: what its network is compared with."""

import importlib.util
from pathlib import Path

import pytest
import torch

from thinwire.systems.supernet.stereo import measure, random_dot_pair
from thinwire.systems.supernet.stereo.layers import warp

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


def test_motorcycle(motorcycle):
    left, right, d = motorcycle
    assert left.shape == right.shape == (3, 500, 741)
    known = d.isfinite()
    assert int(known.sum()) == 343_274
    assert float(d[known].min()) == pytest.approx(7.19, abs=0.01)
    assert float(d[known].max()) == pytest.approx(59.91, abs=0.01)
    assert float(d[known].median()) == pytest.approx(38.73, abs=0.01)


def test_the_truth_of_the_motorcycle_is_of_the_left_view(motorcycle):
    left, right, d = motorcycle
    known = d.isfinite() & (torch.arange(741) - torch.where(d.isfinite(), d, 0.0) >= 0)
    assert int(known.sum()) == 332_144
    moved = warp(right[None], torch.where(known, d, 0.0)[None])[0]
    assert float((moved - left).abs().mean(0)[known].mean()) == pytest.approx(0.030, abs=0.002)


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
