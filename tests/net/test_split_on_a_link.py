"""Two machines of the lab over TLS: four messages a step, bytes as predicted."""

import json
import sys

import pytest
from wires import collect

from thinwire.systems.link.keys import new_keys
from thinwire.systems.split import Link, Shape, SplitPlan, crossings, estimate, prepare
from thinwire.systems.split.models import preset
from thinwire.tools import lab

pytestmark = [pytest.mark.net, pytest.mark.usefixtures("no_leftovers")]

SCRIPT = """
import json, os, sys, torch
from thinwire.tools.bench.round_robin import transmitted_bytes
from thinwire.systems.split import Batch, CloudClient, CloudEnd, CloudServer, Credentials, EdgeEnd, Recipe, load_half
torch.set_num_threads(1)
folder, recipe = sys.argv[1], Recipe(batch_size=8)
if os.environ["RANK"] == "0":
    half = load_half(folder, "cloud")
    cloud = CloudEnd(half.module, half.pair, recipe)
    CloudServer(cloud, "0.0.0.0", 7443, Credentials.of(folder + "/keys/cloud")).serve(1, idle_seconds=200)
    sys.exit()
half = load_half(folder, "edge")
edge = EdgeEnd(half.module, half.pair, recipe, 10)
ids = torch.randint(5, 100, (8, 32))
batch = Batch({"input_ids": ids}, torch.zeros(8, dtype=torch.int64), torch.full((8,), 32), torch.arange(8))
keys, far = Credentials.of(folder + "/keys/edge"), os.environ["MASTER_ADDR"]
with CloudClient(far, 7443, keys, reconnect_seconds=150) as link:  # the other's imports take long on a busy machine
    link.attach(edge)
    edge.step(batch)
    sent, ledger, count = transmitted_bytes("eth0"), link.ledger.wire, sum(link.ledger.messages.values())
    up = sum(link.ledger.sent.values())
    for _ in range(3):
        edge.step(batch)
    found = [transmitted_bytes("eth0") - sent, sum(link.ledger.sent.values()) - up, link.ledger.wire - ledger]
    print(json.dumps([*found, sum(link.ledger.messages.values()) - count]))
    edge.bye()
"""


@pytest.mark.slow  # tests/dist has the two processes, tests/unit/split the bytes of messages
def test_a_step_across_a_slow_link(any_mode, tmp_path):
    plan = SplitPlan(1, "boundary")
    prepare(preset("bert", classes=2, vocabulary=100, length=32, layers=2, hidden=128, heads=2), plan, tmp_path)
    new_keys(tmp_path / "keys", ["cloud", "edge"], ["10.77.0.1"])
    cluster = lab.Cluster.parse(2, 1, "10mbit")
    result, lines = collect(cluster, [sys.executable, "-c", SCRIPT, str(tmp_path)], timeout_seconds=250)
    assert result.exit_codes == (0, 0), lines
    on_wire, sent, both_ways, messages = json.loads(lines[1][-1])
    assert messages == 3 * 4
    step = crossings(plan, Shape(128, 512, 2), [32] * 8, 8, 32)
    spec = cluster.link(0)
    predicted = estimate(step, Link(1e7, 1e7, spec.delay_seconds, spec.burst_bytes))
    assert both_ways == 3 * predicted.wire
    assert sent == 3 * predicted.bytes_up
    assert sent < on_wire < 1.12 * sent + 3 * 4 * 200  # headers of packets, and acknowledgements of what came
