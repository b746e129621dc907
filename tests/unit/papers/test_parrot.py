"""FedML Parrot: what schedules gain on devices of different speed, and its verdict."""

import pytest

from thinwire.systems.papers.parrot import judge, simulated


def test_schedules_gain_where_devices_differ():
    shown = {one.key: one.value for one in simulated()}
    assert shown["8 equal GPUs"] == pytest.approx(1.07, abs=0.05)
    assert shown["8 GPUs, half of them at 50 %"] == pytest.approx(1.5, abs=0.1)  # (4 + 4 / 2) / 8 of the slowest
    assert shown["8 GPUs at 100, 60 and 30 %"] == pytest.approx(2.2, abs=0.15)


def test_verdicts():
    found = {"memory": 50.0, "lpt": 1.5, "pull": 1.6, "8 equal GPUs": 1.07, "different": 0}
    assert judge(found)[0] == "holds"
    assert judge({**found, "lpt": 1.1, "pull": 1.12})[0] == "holds where"
    assert judge({**found, "memory": 2.0})[0] == "does not hold:"
    assert judge({**found, "different": 1})[0] == "does not hold:"
