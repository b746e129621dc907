"""DeAR: its step beside each rival's, what its tuner gains, and the verdict."""

import pytest

from thinwire.systems.papers.dear import FIXED, judge, simulated, tuned


def test_eighty_three_percent_is_found_only_over_layers_that_share_no_message():
    found = {one.key: one.value for one in simulated()}
    assert found["bound"] == pytest.approx(1.25)
    assert found["WFBP, no fusion 10gbit"] > 1.83 > found["MG-WFBP 10gbit"] > found["DDP, 25 MB 10gbit"] > 1.1
    assert 1.0 < found["best bucket 10gbit"] < 1.25
    assert found["25 MB of its own 10gbit"] == pytest.approx(1.08, rel=0.03)
    assert found["trials 10gbit"] <= 12


def test_the_tuner_finds_a_minimum_and_counts_its_trials():
    seconds, trials = tuned({FIXED * 2.0**k: 1 + 0.1 * abs(k - 1) for k in range(-3, 4)})
    assert seconds == 1.0
    assert 7 <= trials <= 12


@pytest.mark.parametrize(
    ("best", "fused", "word"), [(1.7, 1.8, "holds"), (1.2, 1.8, "holds where"), (1.2, 1.4, "does not hold:")]
)
def test_the_verdict_follows_from_the_figures(best, fused, word):
    rivals = ("DDP, 25 MB", "Horovod, 64 MB", "MG-WFBP")
    found = {f"{label} 10gbit": fused for label in rivals} | {
        "WFBP, no fusion 10gbit": 4.0,
        "bound": 1.25,
        "best bucket 100gbit": 1.0,
    }
    assert judge(found | {"best bucket 10gbit": best, "DDP, best bucket measured": 1.1})[0] == word
