"""SPD-KFAC: its published seconds follow from constants that are fitted to its rivals only."""

import pytest

from thinwire.systems.papers.spdkfac import BROADCAST, PUBLISHED, judge, simulated


def test_published_seconds_follow():
    shown = {one.key: one for one in simulated()}
    for key, one in shown.items():
        if one.unit == "s" and key.endswith(("a step", "inverting", "sending inverses")) and "densenet" not in key:
            assert one.value == pytest.approx(float(one.published), abs=0.08, rel=0.15), key
    assert shown["D-KFAC densenet201 inverting"].value == pytest.approx(0.4818, rel=0.05)  # nothing is fitted to it
    for model in PUBLISHED:
        gain = shown[f"SPD-KFAC {model}"]
        assert gain.value == pytest.approx(float(gain.published), abs=0.08)
        assert shown[f"our rules {model}"].value > gain.value
    assert 0.8 < shown["KAISA, one half"].value < 1


def test_the_broadcast_is_what_mpd_kfac_sends():
    for model in ("resnet50", "resnet152", "densenet201"):
        assert PUBLISHED[model][2]["D-KFAC"][2] == 0
    assert BROADCAST.startup_seconds == pytest.approx(1.07e-3)


def test_verdicts():
    found = {"SPD-KFAC": 1.18, "our rules": 1.39, "our rules measured": 1.2, "SPD-KFAC measured": 0.8}
    assert judge(found)[0] == "holds"
    assert judge({**found, "our rules measured": 0.95})[0] == "holds where"
    assert judge({**found, "SPD-KFAC": 1.0, "our rules": 1.05})[0] == "does not hold:"
