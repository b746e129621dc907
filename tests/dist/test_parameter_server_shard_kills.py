"""kill -9 of what a model in shards is made of, each a process: a leader within a sum, a shard, the server."""

import json
import os
import signal
import subprocess
import sys

import pytest
from test_parameter_server_kills import check_journal, processes, reach, settings, wait_for  # noqa: F401

from spawned import free_port

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def serve(port, folder, updates):
    """The server's process; a line per update in `versions`."""
    import torch
    from parameter_cluster import model, sgd

    from thinwire.systems.parameter_server import Service

    torch.set_num_threads(1)
    log = open(f"{folder}/versions", "a", buffering=1)  # noqa: SIM115  to the end of the process

    def on_update(version, theta):
        assert torch.isfinite(theta).all()
        assert theta.numel() == 44
        log.write(f"{version}\n")

    Service(model(), settings(), port=port, host="127.0.0.1", outer=sgd(), updates=updates,
            checkpoint_dir=f"{folder}/c", checkpoint_every=5,
            journal=f"{folder}/j", nodes=2, on_update=on_update, shards=2).run()  # fmt: skip


def keep(port, index, folder):
    import torch
    from parameter_cluster import sgd

    from thinwire.systems.parameter_server import serve_shard

    torch.set_num_threads(1)
    serve_shard(f"127.0.0.1:{port}", index=index, outer=sgd(), checkpoint_dir=f"{folder}/c")


def lead(port, number, dies=False):
    """A node whose one worker is a thread; it may die when a sum's header and one of its pieces have gone."""
    import torch
    from parameter_cluster import model, part_of

    from thinwire.systems.link.peer import Peer
    from thinwire.systems.parameter_server import Node, Worker

    torch.set_num_threads(1)
    pieces = [0]
    send = Peer.send_tensor

    def sending(self, x, seconds):
        pieces[0] += x.numel() == 22
        if dies and pieces[0] > 12:
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, x, seconds)

    Peer.send_tensor = sending
    node = Node(f"127.0.0.1:{port}", number, 1, leases=10.0)
    Worker(model(), *part_of(number, 0, 0.02), node.address, 0, check=lambda: node.wait(0)).run()
    node.wait(5)


def test_a_leader_dies_between_the_pieces_of_a_sum(tmp_path, processes):  # noqa: F811
    port, updates = free_port(), 120
    server = processes.start(serve, port, tmp_path, updates)
    shards = [processes.start(keep, port, index, tmp_path) for index in range(2)]
    processes.start(lead, port, 0)
    dying = processes.start(lead, port, 1, True)
    wait_for(lambda: not dying.is_alive())
    assert dying.exitcode == -signal.SIGKILL
    processes.start(lead, port, 1)  # the node comes back
    for process in (server, *shards):
        process.join(90)
        assert process.exitcode == 0
    check_journal(tmp_path, updates)


def test_the_server_dies_and_its_shards_and_nodes_wait_for_the_next(tmp_path, processes):  # noqa: F811
    port, updates = free_port(), 100
    server = processes.start(serve, port, tmp_path, updates)
    shards = [processes.start(keep, port, index, tmp_path) for index in range(2)]
    for number in range(2):
        processes.start(lead, port, number)
    reach(tmp_path, 40)
    server.kill()
    server.join()
    again = processes.start(serve, port, tmp_path, updates)
    for process in (again, *shards):
        process.join(90)
        assert process.exitcode == 0
    check_journal(tmp_path, updates)


def thinwire(*words):
    command = [sys.executable, "-c", "from thinwire.tools.cli.main import run; run()", "ps", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_killed_shard_ends_the_verb_with_a_sentence_and_all_go_on_when_started_again(tmp_path):
    port, there = free_port(), []

    def start(*words):
        there.append(thinwire(*words))
        return there[-1]

    def server(updates):
        return start("server", "--model", "mlp:width=32:layers=2", "--shards", 2, "--port", port, "--updates", updates,
                     "--outer", "sgd:lr=0.01", "--checkpoint-dir", tmp_path, "--checkpoint-every", 10,
                     "--json")  # fmt: skip

    def shard(index):
        return start("shard", f"127.0.0.1:{port}", "--index", index, "--checkpoint-dir", tmp_path, "--json")

    try:
        first, shards = server(1_000_000), [shard(0), shard(1)]
        node = start("node", "--server", f"127.0.0.1:{port}", "--model", "mlp:width=32:layers=2", "--node", 0,
                     "--pace", 0.01)  # fmt: skip
        wait_for(lambda: (tmp_path / "version-000000020.pt").exists())
        shards[1].kill()
        _, words = first.communicate(timeout=120)
        assert first.returncode == 1
        assert "error: shard 1 (port " in words
        assert "they continue from version" in words
        assert "Traceback" not in words
        saved = max(int(path.stem[-9:]) for path in tmp_path.glob("version-*.pt"))
        second, back = server(saved + 50), shard(1)
        out, words = second.communicate(timeout=120)
        assert second.returncode == 0, words
        assert json.loads(out)["version"] == saved + 50
        for process in (shards[0], back):
            out, words = process.communicate(timeout=120)
            assert process.returncode == 0, words
            assert json.loads(out)["version"] == saved + 50
        assert node.wait(120) == 0
    finally:
        for process in there:
            process.kill()
            process.communicate()
