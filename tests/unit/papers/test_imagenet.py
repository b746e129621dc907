"""The four-minute ImageNet: what hierarchies gain over flat rings and over trees, and large batches in the small."""

import pytest
import torch

from thinwire.systems.papers.imagenet import judge, simulated, turned
from thinwire.tools.bench.models.digits import images


def test_hierarchies_beat_rings_with_small_messages_and_not_trees():
    shown = {one.key: one.value for one in simulated()}
    assert shown[f"rings {1 << 16}"] == pytest.approx(7.7, rel=0.05)
    assert shown["rings 102228128"] < 1
    assert shown["rings step"] > 0.8 * 11
    trees = [value for key, value in shown.items() if key.startswith("today")]
    assert max(trees) < 1.2


def test_turned_digits_are_near_their_own():
    pytest.importorskip("sklearn")
    x, y, _, held_out = turned(2)
    assert (len(x), len(y), len(held_out)) == (2 * 1437, 2 * 1437, 360)
    own = images()[0][:1437]
    alike = torch.nn.functional.cosine_similarity(x[:1437].flatten(1), own.flatten(1)).mean()
    other = torch.nn.functional.cosine_similarity(x[:1437].flatten(1), own.roll(1, 0).flatten(1)).mean()
    assert alike > other + 0.1


def test_verdicts():
    found = {"SGD, small batch": 99.4, "LARS": 99.2, "LAMB": 98.0, "SGD, tuned": 98.0, "rings step": 15.0}
    trees = "today's rings or trees step"
    assert judge({**found, trees: 1.0})[0] == "holds where"
    assert judge({**found, trees: 3.0})[0] == "holds"
    assert judge({**found, trees: 3.0, "LARS": 97.0})[0] == "does not hold:"
