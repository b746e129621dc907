"""``auto`` on the card: what it measures between steps, and how it times the exchanges of the steps themselves."""

from collections import Counter

import pytest
from training import training

from thinwire.core.pricing.costs import KINDS
from thinwire.engine.ranks.communicator import Communicator


@pytest.mark.parametrize("lossy", [False, True])
def test_auto_settles_without_a_finding(monkeypatch, lossy):
    timed = []

    def typical(communicator):
        timed.append(communicator.executor.watch.totals())
        return 1 << 30, 10.0  # larger and slower than any that is measured, however busy the machine is

    monkeypatch.setattr(Communicator, "typical_exchange", typical)
    with training("auto", lossy=lossy) as run:
        for _ in range(14):
            run.step()
        stats, pilot = run.sync.stats(), run.sync.services.controller
    assert stats.settled
    assert any("plans priced" in line for line in stats.why)
    assert not Counter(map(str, run.card.findings))
    [(*_, exchanges, sent, _)] = timed
    assert exchanges >= 3  # those of the measured steps
    assert sent > 0
    assert {kind for kind, *_ in pilot.costs.exchanges} == set(KINDS)
    assert pilot.costs.exchanges["AllReduce", "world", 4](1 << 30) == pytest.approx(10.0)


def test_no_message_that_opens_connections_is_timed(monkeypatch, tmp_path):
    """NCCL opens more when it changes its protocol with the size: the first message of each size does not count."""
    from thinwire.predict.measure.probe import ExchangeTimer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is remembered
    asked = []
    time = ExchangeTimer.time

    def noted(self, kind, scope, size, count):
        asked.append((kind, size, count))
        return time(self, kind, scope, size, count)

    monkeypatch.setattr(ExchangeTimer, "time", noted)
    with training("auto") as run:
        for _ in range(14):
            run.step()
    first = {(kind, size): [n for k, s, n in asked if (k, s) == (kind, size)][:2] for kind, size, _ in asked}
    assert len({size for _, size in first}) > 1
    assert all(counts == [1, 1] for counts in first.values())
    assert not run.card.findings
