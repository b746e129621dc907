import heapq
import itertools
import random

import pytest
from random_nets import KINDS, exchange, net, sort_seconds

from thinwire.core.pricing.merge import finish


def event_simulation(groups, sizes, seconds, exchange_seconds, select_seconds, side_stream):
    """Tasks on streams: a stream takes its tasks in order, each when what it needs is done; a heap of endings."""
    queues = {"compute": [], "side": [], "link": []}
    for g, group in enumerate(groups):
        size = sum(sizes[i] for i in group)
        for i in group:
            queues["compute"].append((("backward", i), seconds[i], []))
        ready = ("backward", group[-1])
        if select_seconds is not None:
            stream = "side" if side_stream else "compute"
            queues[stream].append((("select", g), select_seconds(size), [ready]))
            ready = ("select", g)
        queues["link"].append((("send", g), exchange_seconds(size), [ready]))
    done, busy, endings, now = set(), set(), [], 0.0
    while True:
        for stream, queue in queues.items():
            if queue and stream not in busy and all(need in done for need in queue[0][2]):
                task, duration, _ = queue.pop(0)
                busy.add(stream)
                heapq.heappush(endings, (now + duration, task, stream))
        if not endings:
            return now
        now, task, stream = heapq.heappop(endings)
        done.add(task)
        busy.remove(stream)


def some_groups(draw, count):
    borders = [0, *sorted(draw.sample(range(1, count), draw.randint(0, count - 1))), count] if count > 1 else [0, count]
    return [list(range(i, j)) for i, j in itertools.pairwise(borders)]


@pytest.mark.parametrize("form", ["dense", "backward stream", "side stream"])
def test_it_is_what_an_event_simulator_finds(form):
    draw = random.Random(form)
    for case in range(200):
        n = net(draw, 1, 30)
        groups = some_groups(draw, len(n.sizes))
        price, side = exchange(draw, KINDS[case % 3]), form == "side stream"
        select = None if form == "dense" else sort_seconds
        want = event_simulation(groups, n.sizes, n.seconds, price, select, side)
        got = finish(groups, n.sizes, n.seconds, price, select, side_stream=side)
        assert got == pytest.approx(want, rel=1e-9)
