import pytest
import torch

from thinwire.core.pricing.costs import KINDS, Table
from thinwire.engine.executors.events import ExchangeTimes, typical
from thinwire.predict.measure.gradual import with_seen
from thinwire.predict.measure.kernels import Stopwatch


def watched(rows):
    now = [0.0]
    watch = ExchangeTimes(Stopwatch(torch.device("cpu"), lambda: now[0]))
    for issued, done, sent in rows:
        now[0] = done
        watch.add(issued, sent)
    return watch.totals()


def test_what_waited_for_the_link_counts_from_the_end_of_the_one_before():
    totals = watched([(1.0, 3.0, 10), (2.0, 4.0, 20), (2.5, 7.0, 30), (8.0, 9.0, 40)])
    assert totals == [2, 50, 1.0 + 3.0, 4, 100, 2.0 + 1.0 + 3.0 + 1.0]


def test_the_typical_exchange_is_of_those_that_were_queued():
    assert typical([[2, 50, 4.0, 4, 100, 7.0]] * 2, 2) == (25, 2.0)
    assert typical([[0, 0, 0, 1, 90, 3.0], [0, 0, 0, 1, 90, 1.0]], 4) == (60, 2.0)  # early and late
    assert typical([[0.0] * 6] * 2, 2) is None


def test_curves_go_on_through_what_was_seen():
    small = Table(((4096, 1e-3), (65536, 4e-3), (4 * 65536, 13e-3)), "measured here", "x")
    exchanges = {(kind, "world", 2): small for kind in KINDS} | {("AllReduce", "node", 2): small}
    found = with_seen(exchanges, 2, (1 << 20, 0.1))
    assert found["AllReduce", "node", 2] == small
    assert found["AllReduce", "world", 2](1 << 20) == pytest.approx(0.1)
    assert found["AllReduce", "world", 2](4096) == 1e-3
    assert found["ReduceScatter", "world", 2](1 << 21) == pytest.approx(0.1)  # as many bytes on the wire
    assert found["AllGather", "world", 2](1 << 22) == pytest.approx(0.4, rel=0.05)
    assert with_seen(exchanges, 2, (32768, 0.1)) == exchanges  # no larger than what was measured
    assert with_seen(exchanges, 2, (1 << 20, 1e-3)) == exchanges  # faster than the smallest


def test_a_mishap_among_small_messages_does_not_set_the_rate_of_large_ones():
    """As when the first message of a size opens connections."""
    slow = Table(((4096, 1e-3), (65536, 0.2), (4 * 65536, 0.8)), "measured here", "x")
    found = with_seen({(kind, "world", 2): slow for kind in KINDS}, 2, (25 << 20, 22e-3))
    assert found["AllReduce", "world", 2](25 << 20) == pytest.approx(22e-3)
    assert found["AllToAll", "world", 2](25 << 20) < 22e-3  # sends half as much
