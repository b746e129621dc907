"""Flower: records, the strategy, a real SuperLink with TLS and two SuperNodes. Skipped where Flower is not installed.

It pins other versions of typer and rich than thinwire's own environment has, so it needs one of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower is not installed here: pip install 'thinwire[flower]' elsewhere")

from thinwire.systems import federated as fl  # noqa: E402
from thinwire.systems.federated.flower import app as flower  # noqa: E402
from thinwire.systems.federated.remote import NodeMessage, RemoteNode, RemoteServer  # noqa: E402
from thinwire.systems.federated.state import unpack  # noqa: E402

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]
CODE = """
import torch
from thinwire.systems import federated as fl

torch.set_num_threads(1)


def build():
    def load(i):
        draw = torch.Generator().manual_seed(i)
        x = torch.randn(6, 5, generator=draw)
        return x, (x.sum(1) > 0).long()

    torch.manual_seed(0)
    return fl.Federation(
        fl.Scaffold(lr=0.1, batch_size=4), torch.nn.Linear(5, 2), fl.FunctionClients(10, load, 6),
        rounds=2, clients_per_round=6, reduction="exact",
    )
"""


def federation():
    scope = {}
    exec(CODE, scope)
    return scope["build"]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_messages_survive_records(dtype):
    content = NodeMessage(
        {"a": torch.arange(6).view(2, 3).to(dtype), "b": torch.zeros(0)}, {"x": [1, 2.5], "y": {"1": "z"}}
    )
    found = flower.from_record(flower.to_record(content))
    assert found.facts == content.facts
    assert all(
        torch.equal(found.tensors[k], x) and found.tensors[k].dtype == x.dtype for k, x in content.tensors.items()
    )


def test_records_of_others():
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    for content in (
        RecordDict(),
        RecordDict({"tensors": ArrayRecord(), "facts": ConfigRecord({"json": "{"})}),
        RecordDict({"tensors": ArrayRecord(), "facts": ConfigRecord({"json": "[1]"})}),
        RecordDict(
            {
                "tensors": ArrayRecord(
                    {"a": Array(dtype="float32", shape=(1,), stype="pickle", data=b"cos\nsystem\n")}
                ),
                "facts": ConfigRecord({"json": "{}"}),
            }
        ),
    ):
        with pytest.raises(ValueError, match="not a thinwire message"):
            flower.from_record(content)


class Loopback:
    """Flower's Grid with the nodes in this process: messages are Flower's own, and so is the round loop."""

    def __init__(self, folder, nodes):
        self.folder, self.nodes = folder, nodes

    def get_node_ids(self):
        return list(range(1, self.nodes + 1))

    def send_and_receive(self, messages, *, timeout=None):
        from flwr.app import Message

        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            clients = list(range(node - 1, 10, self.nodes))
            host = RemoteNode(federation(), clients, self.folder / str(node))
            content = flower.from_record(message.content)
            answer = host.describe() if message.metadata.message_type == "query" else host.answer(content)
            replies.append(Message(content=flower.to_record(answer), reply_to=message))
        return replies


def test_flowers_round_loop_gives_the_bits_of_the_simulation(tmp_path, monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):  # what a process of a deployment is told about itself
        monkeypatch.setattr(TaskIdentity, name, 1)
    made = federation()
    grid = Loopback(tmp_path, 3)
    hosts = flower.ask_nodes(grid, flower.wait_for_nodes(grid, 3, 1.0), 1.0)
    assert sorted(hosts) == [1, 2, 3]
    server = RemoteServer(made, hosts)
    strategy = flower.make_strategy(server)
    strategy.start(grid, strategy.arrays(), num_rounds=2)
    server.finish()
    straight = federation()
    straight.simulate()
    assert torch.equal(made.model.weight, straight.model.weight)
    assert [row.clients for row in server.history.rounds] == [6, 6]


def test_too_few_nodes(tmp_path):
    with pytest.raises(TimeoutError, match="3 nodes of 4 have connected"):
        flower.wait_for_nodes(Loopback(tmp_path, 3), 4, 0.0)


def test_which_clients_a_node_hosts():
    assert flower.hosted({"clients": "0-3, 7"}, 10) == [0, 1, 2, 3, 7]
    assert flower.hosted({"partition-id": 1, "num-partitions": 4}, 10) == [1, 5, 9]
    with pytest.raises(ValueError, match="use ranges and numbers"):
        flower.hosted({"clients": "one"}, 10)
    with pytest.raises(ValueError, match="hosts no clients"):
        flower.hosted({}, 10)


def serve(tmp_path, *options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", "from thinwire.tools.cli.main import run; run()", "federated", "serve", *options]
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_real_deployment_with_tls_gives_the_bits_of_the_simulation(tmp_path):
    """B16: two SuperNodes that host five clients each; each message is a process of its own."""
    (tmp_path / "mine.py").write_text(CODE)
    done = serve(tmp_path, "mine:build", "--nodes", "2", "--local", "--out", "out", "--json", "--certificates", "tls")
    assert done.returncode == 0, done.stderr[-3000:]
    straight = federation()
    straight.simulate()
    found = unpack((tmp_path / "out" / "model.safetensors").read_bytes())
    assert all(torch.equal(found[name], x) for name, x in straight.model.named_parameters())
    assert fl.History.from_json(done.stdout) == fl.History.from_json((tmp_path / "out" / "history.json").read_text())
    assert json.loads(done.stdout)["about"]["nodes"] == 2
    assert (tmp_path / "tls" / "server.key").stat().st_mode & 0o077 == 0


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_deployment_that_fails_is_a_sentence(tmp_path):
    (tmp_path / "wrong.py").write_text("def build():\n    raise OSError('no data here')\n")
    done = serve(tmp_path, "wrong:build", "--nodes", "1", "--local", "--timeout", "60")
    assert done.returncode == 1
    assert "error: the run ended with status" in done.stderr
    assert "Traceback" not in done.stderr
    assert serve(tmp_path, "none:build").returncode == 2
