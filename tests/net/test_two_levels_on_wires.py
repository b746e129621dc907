"""Two nodes of two ranks: what crosses is what the formulas say, and what stays in a node costs its link nothing."""

import json
import sys

import pytest
from wires import collect

from thinwire.tools import lab

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("no_leftovers")]

SCRIPT = """
import json, torch, torch.distributed as dist, thinwire as tw
from thinwire.tools.bench.round_robin import transmitted_bytes
from torch import nn
dist.init_process_group("gloo")
found = {}
for label, name, options in json.loads(%r):
    torch.manual_seed(0)
    net = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = tw.attach(net, optimizer, name, **options)
    for step in range(6):
        if step == 2:
            dist.barrier()
            before, sent = transmitted_bytes("eth0"), sync.stats().bytes_sent
        net(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    found[label] = [transmitted_bytes("eth0") - before, sync.stats().bytes_sent - sent, sync.services.topology.layout]
    sync.close()
print(json.dumps(found))
dist.destroy_process_group()
"""
METHODS = [
    ("flat", "ssgd", {}),
    ("three_phase", "ssgd", {"collective": "three_phase"}),
    ("torus", "ssgd", {"collective": "torus"}),
    ("hitopk", "hitopk", {"density": 0.05}),
]


@pytest.mark.slow
def test_a_node_sends_what_the_formulas_say(any_mode):
    script = SCRIPT % json.dumps(METHODS)
    result, lines = collect(lab.Cluster.parse(4, 2, "1gbit"), [sys.executable, "-c", script], timeout_seconds=250)
    assert result.exit_codes == (0,) * 4, lines
    ranks = [json.loads(of_rank[-1]) for of_rank in lines]
    size, steps = 4 * 512 * 512, 4
    kept = int(0.05 * 512 * 512 / 2 + 1e-6)
    across = {  # of one node, in a step
        "flat": 2 * 3 / 4 * size,
        "three_phase": size,
        "torus": size,
        "hitopk": 2 * 8 * kept,
    }
    for label, payload in across.items():
        for node in (0, 1):
            count, _, layout = ranks[2 * node][label]
            assert layout == [2, 2]
            assert steps * payload <= count <= 1.08 * steps * payload + 60_000, (label, count / steps / payload)
