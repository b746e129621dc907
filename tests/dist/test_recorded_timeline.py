"""The real timeline: one file per rank, on the simulator's lanes."""

import json

import cases
import pytest
import torch

import thinwire as tw
from spawned import run

pytestmark = pytest.mark.dist


def _traced(rank, size, folder, method, options):
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = tw.attach(net, optimizer, method, **options)
    cases.loss_of(net, rank, 0).backward()
    optimizer.zero_grad()
    before = sync.stats().bytes_sent
    with sync.trace(f"{folder}/{rank}.json"):
        cases.loss_of(net, rank, 1).backward()
    sent, buckets = sync.stats().bytes_sent - before, len(sync.plan.phases[0])
    optimizer.zero_grad()
    cases.loss_of(net, rank, 2).backward()  # recorded no longer
    sync.close()
    return sent, buckets


@pytest.mark.parametrize(("method", "options"), [("ssgd", {"fusion": "none"}), ("topk", {"density": 0.1})])
def test_a_step_is_recorded(tmp_path, method, options):
    for rank, (sent, _) in enumerate(run(_traced, 2, str(tmp_path), method, options)):
        events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        whole = [event for event in events if event["ph"] == "X"]
        lanes = {event["cat"] for event in whole}
        assert {"compute", "method", "link world"} <= lanes
        assert {event["name"] for event in whole if event["cat"] == "compute"} == {"forward", "backward"}
        exchanges = [event for event in whole if event["cat"] == "link world"]
        assert sum(event["args"]["bytes"] for event in exchanges) == sent
        assert all(event["dur"] >= 0 for event in whole)
