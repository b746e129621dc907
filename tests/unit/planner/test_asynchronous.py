"""Costs of asynchronous schemes against the simulation of their protocol, and virtual time by itself."""

import pytest

from thinwire.core.virtual_time import VirtualTime
from thinwire.systems.parameter_server import presets, simulate
from thinwire.systems.parameter_server.synchronous import hierarchical_seconds, synchronous_step_seconds
from thinwire.systems.parameter_server.virtual import Card, VirtualChannel


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_bytes_per_gradient_are_those_that_the_protocol_sends(workers):
    model, control = 4_000_000, 128

    def steps(node, worker, step, rng):
        return 1.0

    one = simulate(presets.asp(), nodes=4, workers=workers, updates=400, step_seconds=steps, payload_bytes=model)
    assert one.bytes_per_gradient == pytest.approx(2 * model + 2 * control, rel=0.05)
    summed = simulate(presets.bsp(start_nodes=4), nodes=4, workers=workers, updates=100, step_seconds=steps,
                      payload_bytes=model)  # fmt: skip
    pulled = 2 * model / workers + control * (1 + 3 / workers)
    assert summed.bytes_per_gradient == pytest.approx(pulled, rel=0.02)


def test_a_synchronous_step_waits_for_the_slowest_and_for_what_backward_does_not_hide():
    def steps(node, worker, step, rng):
        return 3.0 if node == 1 else 1.0

    assert synchronous_step_seconds(steps, 4, 2, 0.0) == pytest.approx(3.0)
    assert synchronous_step_seconds(steps, 4, 2, 5.0) == pytest.approx(3.0 + 5.0 - 2.0)
    assert hierarchical_seconds(1e6, 4, 8e6, 0.0) == pytest.approx(1.5)


def test_messages_share_a_card_keep_their_order_and_may_be_small():
    time = VirtualTime()
    source, first, second = Card(8e6), Card(8e6), Card(None)
    seen = []
    one = VirtualChannel(time, source, first, 0.5, small_bytes=100)
    two = VirtualChannel(time, source, second, 0.1, small_bytes=100)
    one.send(1_000_000, lambda: seen.append(("a", time.now)))
    two.send(1_000_000, lambda: seen.append(("b", time.now)))  # waits for a at the card
    two.send(10, lambda: seen.append(("c", time.now)))  # small, but b is before it
    while time.next[0] < 10:
        time.step()
    assert seen == [("b", pytest.approx(2.1)), ("c", pytest.approx(2.1)), ("a", pytest.approx(2.5))]
    assert source.bytes == 2_000_010


def test_a_closed_channel_delivers_nothing():
    time = VirtualTime()
    channel = VirtualChannel(time, Card(None), Card(None), 1.0)
    channel.send(10, lambda: pytest.fail("delivered"))
    channel.open = False
    time.step()
    assert time.now == 1.0


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_card_without_a_rate_is_refused(rate):
    with pytest.raises(ValueError, match="bits_per_second"):
        Card(rate)
