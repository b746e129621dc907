"""InHAD: gradients a second at its scale, real gradients in virtual time, and its verdict."""

import pytest

from thinwire.systems.papers.inhad import INHAD, judge, reached, served, simulated


def test_sums_carry_more_gradients_through_the_servers_link():
    shown = {one.key: one.value for one in simulated()}
    assert shown["asp 1 Gb/s"] > 5
    assert shown["asp 10 Gb/s"] > 5
    assert shown["all-reduce 1 Gb/s"] < 1 < shown["all-reduce 10 Gb/s"]


@pytest.mark.parametrize("scheme", [INHAD, "all-reduce"])
def test_a_scheme_trains_in_virtual_time_alike_twice(scheme):
    pytest.importorskip("sklearn")
    run = served(scheme, 0.01, 1e8, 4, 0, seconds=4.0)
    assert run == served(scheme, 0.01, 1e8, 4, 0, seconds=4.0)
    assert run[0][1] == pytest.approx(2.3, abs=0.1)
    assert reached([run], 0.0) == 120


def test_verdicts():
    cases = {"100mbit 4 0.7": (36.0, 29.0), "6mbit 4 0.9": (120.0, 48.0), "100mbit 32 0.7": (30.0, 35.0)}
    found = {f"{text} {case}": value for case, pair in cases.items() for text, value in zip(("asp", INHAD), pair)}
    found |= {"asp lab": 20.0, f"{INHAD} lab": 25.0}
    found |= {"asp 10 Gb/s": 7.0, "all-reduce 100mbit 4 accuracy": 97.0, f"{INHAD} 100mbit 4 accuracy": 96.5}
    assert judge(found)[0] == "holds where"
    assert judge({**found, f"{INHAD} 100mbit 32 0.7": 15.0})[0] == "holds"
    assert judge({**found, f"{INHAD} 100mbit 4 0.7": 60.0})[0] == "does not hold:"
