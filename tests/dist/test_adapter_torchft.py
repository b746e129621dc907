"""Replicas under torchft's real lighthouse and managers, some of which are killed, stopped and started again."""

import importlib.util
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torchft_cases import Cluster, check, untrained_loss

import thinwire as tw
from spawned import free_port

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        importlib.util.find_spec("torchft") is None, reason="torchft is not installed: pip install torchft"
    ),
]
AT_ONCE = {"start_compression_step": 0}
METHODS = {
    "ssgd": {},
    "cast": {"dtype": "int8"},
    "acp": {"rank": 2, **AT_ONCE},
    "powersgd": {"rank": 2, **AT_ONCE},
    "topk": {"density": 0.1, **AT_ONCE},
    "local": {"sync_every": 4, "codec": tw.TopK(density=0.1), **AT_ONCE},
    "diloco": {"sync_every": 4, "outer": tw.Nesterov(momentum=0.5)},
}


def all_at(cluster, step):
    return all(cluster.step_of(number) >= step for number in cluster.running)


def more_steps(cluster, count, *, without=None):
    """Wait until all have made some more."""
    step = furthest(cluster) + count
    cluster.wait(lambda: all(cluster.step_of(n) >= step for n in cluster.running if n != without))


def meet(cluster, victim, fault):
    """Let a fault meet a replica; the others go on, and then all."""
    cluster.signal(victim, fault)
    more_steps(cluster, 3, without=victim)
    if fault == signal.SIGKILL:
        cluster.running[victim].join()
        cluster.start(victim)
    else:
        cluster.signal(victim, signal.SIGCONT)
    more_steps(cluster, 3)


def furthest(cluster):
    return max(cluster.step_of(number) for number in cluster.running)


@pytest.mark.parametrize(
    ("method", "faults"),
    [("ssgd", {1: signal.SIGKILL, 0: signal.SIGKILL}), ("local", {2: signal.SIGKILL, 0: signal.SIGSTOP})],
)  # rank 0 holds the quorum's store
def test_the_others_go_on_and_who_comes_back_is_equal(tmp_path, method, faults):
    with Cluster(tmp_path, 3, method, METHODS[method]) as cluster:
        cluster.wait(lambda: all_at(cluster, 3))
        for victim, fault in faults.items():
            meet(cluster, victim, fault)
        events = cluster.finish(furthest(cluster) + 5)
    _, conserved, lost = check(events)
    assert conserved > 10
    assert lost <= 1
    assert len({mine[-1]["weights"] for mine in events.values()}) == 1
    assert events[0][-1]["loss"] < untrained_loss()
    assert {e["size"] for mine in events.values() for e in mine if e["event"] == "step"} >= {2, 3}


def test_one_goes_on_alone_and_pays_what_it_owes_when_another_comes(tmp_path):
    with Cluster(tmp_path, 2, "topk", METHODS["topk"]) as cluster:
        cluster.wait(lambda: all_at(cluster, 4))
        together = furthest(cluster)
        cluster.kill(1)
        alone = furthest(cluster)
        cluster.wait(lambda: cluster.step_of(0) >= alone + 4)
        cluster.start(1)
        cluster.wait(lambda: all_at(cluster, alone + 6))
        events = cluster.finish(furthest(cluster) + 3)
    check(events)
    mine = [e for e in events[0] if e["event"] == "step"]
    assert {e["size"] for e in mine} == {1, 2}
    lonely = [e for e in mine if e["size"] == 1 and e["step"] > alone + 1]  # not those before replica 1 came first
    assert len({e["after"] for e in lonely}) == 1  # owed, and kept
    assert all(e["before"] != e["after"] for e in mine if e["size"] == 2)
    assert {e["lost_norm"] for e in mine if e["step"] <= together} == {0.0}  # nobody has left
    assert mine[-1]["lost_norm"] is None  # who died has not told how much it owed


@pytest.mark.parametrize("method", ["topk", "local"])
def test_who_has_not_heard_that_a_step_counted_keeps_its_part_of_it(tmp_path, method):
    with Cluster(tmp_path, 2, method, METHODS[method], least=2, doubts=(4,)) as cluster:
        cluster.wait(lambda: all_at(cluster, 8))
        events = cluster.finish(furthest(cluster) + 2)
    check(events)
    [doubted] = [e for e in events[0] if e["event"] == "lost"]
    [counted] = [e for e in events[1] if e["event"] == "step" and e["step"] == doubted["step"]]
    following = events[0][events[0].index(doubted) + 1]
    assert following["step"] == counted["step"] + 1
    assert following["before"] != doubted["before"]  # what it kept back in that step, and not zero
    assert following["owed"] != 0


def refused(method="ssgd", *, manager=None, wrapped=False, **options):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrapped:
        from torchft import Optimizer

        optimizer = Optimizer(manager, optimizer)
    tw.adapters.torchft.attach(model, optimizer, method, manager=manager, **options)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"method": "auto"}, '"auto" measures a fixed set of ranks: name a method'),
        ({"timeout": 3}, "timeout= is handled by the manager here: leave it out"),
        ({"method": "dear"}, "a decoupled method updates weights after should_commit was called"),
        ({"method": "local"}, 'sync_every="auto" measures a fixed set of ranks'),
        ({"method": "local", "sync_every": 8, "fragments": 2}, "leave out fragments="),
        ({"method": "local", "sync_every": 8, "fragment_sync_delay": 2}, "leave out fragment_sync_delay="),
        ({"method": "diloco", "inside": "ssgd"}, "leave out inside="),
        ({"method": "diloco", "moments": {"exp_avg": 2}}, "leave out moments="),
        ({"method": "diloco", "wrapped": True}, "pass your own optimizer, not torchft's"),
        ({"method": "acp", "rank": 4, "sync_every": 3}, "sync_every"),
    ],
)
def test_what_has_no_meaning_when_ranks_come_and_go_is_refused(arguments, sentence):
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        refused(**arguments)


def test_a_manager_that_cannot_be_served_is_refused():
    from datetime import timedelta

    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.manager import WorldSizeMode

    with pytest.raises(TypeError, match=re.escape("manager must be a torchft.Manager, not str")):
        refused(manager="manager")
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for options, sentence in (
        ({}, "Manager(use_async_quorum=False)"),
        ({"use_async_quorum": False, "world_size": 2}, "the replica group has 2 processes"),
        ({"use_async_quorum": False, "world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}, "world_size_mode"),
        ({"use_async_quorum": False}, "attach was called with this manager before"),
    ):
        common = {
            "pg": ProcessGroupGloo(timeout=timedelta(seconds=5)), "load_state_dict": None, "state_dict": None,
            "min_replica_size": 1, "rank": 0, "world_size": 1, "store_addr": "127.0.0.1", "store_port": store.port,
            "lighthouse_addr": lighthouse.address(), "replica_id": "replica0", "hostname": "127.0.0.1",
        }  # fmt: skip
        manager = Manager(**{**common, **options})
        if "before" in sentence:
            refused(manager=manager)
        with pytest.raises(ValueError, match=re.escape(sentence)):
            refused(manager=manager)
        manager.shutdown(wait=False)
    lighthouse.shutdown()


class Page:
    """What the page shows, carried out."""

    def __init__(self, folder):
        self.folder, self.running = folder, []
        text = (Path(__file__).parents[2] / "docs" / "when_a_machine_dies.md").read_text()
        (self.script,) = re.findall(r"<!-- train.py -->\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        (self.rounds,) = re.findall(r"<!-- rounds -->\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        (lines,) = re.findall(r"^In three terminals:\n\n```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        self.lighthouse, *self.replicas = lines.splitlines()
        self.port = free_port()
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}

    def __enter__(self):
        command, *options = shlex.split(self.lighthouse)
        (entry,) = entry_points(group="console_scripts", name=command)  # torchft's own, wherever pip has put it
        serve = self.folder / command
        serve.write_text(f"from {entry.module} import {entry.attr}\n{entry.attr}()\n")
        options += ["--bind", f"127.0.0.1:{self.port}", "--heartbeat_timeout_ms", "1000"]
        self.running.append(subprocess.Popen([sys.executable, str(serve), *options], env=self.environment))
        return self

    def __exit__(self, *_):
        for process in self.running:
            process.kill()
            process.wait()

    def start(self, line):
        """A replica, by its line. Returns the process and the file with what it says."""
        (variable, value), *words = line.split(" ")[0].split("="), *line.split(" ")[1:]
        assert words[0] == "python"
        here = {**self.environment, variable: value.replace("29510", str(self.port))}
        said = self.folder / f"replica{len(self.running)}.txt"
        with open(said, "w") as out:
            command = [sys.executable, *words[1:]]
            self.running.append(subprocess.Popen(command, cwd=self.folder, env=here, stdout=out, stderr=out))
        return self.running[-1], said


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path):
    with Page(tmp_path) as page:
        (tmp_path / "train.py").write_text(page.script)
        (first, said), (second, _) = [page.start(line) for line in page.replicas]
        deadline = time.monotonic() + 60
        while ", 2 replicas" not in said.read_text() and first.poll() is None:
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.02)
        second.kill()
        while ", 1 replicas" not in said.read_text() and first.poll() is None:
            time.sleep(0.02)
        again, said_again = page.start(page.replicas[1])
        assert [first.wait(120), again.wait(120)] == [0, 0], said.read_text()
    for told in (said.read_text().splitlines(), said_again.read_text().splitlines()):
        assert "step 399, 2 replicas" in told[-2]  # together again
        assert re.fullmatch(r"acp: sent [1-9]\d* bytes, uncompressed [1-9]\d*", told[-1])


@pytest.mark.slow
def test_the_rounds_of_the_page(tmp_path):
    with Page(tmp_path) as page:
        head, _ = page.script.split("optimizer = Optimizer")
        (tmp_path / "train.py").write_text(head + page.rounds + "os._exit(0)\n")
        both = [page.start(line) for line in page.replicas]
        for process, said in both:
            assert process.wait(90) == 0, said.read_text()
    first, second = (said.read_text().splitlines()[-1] for _, said in both)
    assert re.match(r"\d+ rounds, every 16 steps, by cast; 2 replicas, loss [01]\.\d+", first)  # from 2.3
    assert first.split(";")[1].split(",")[0] == second.split(";")[1].split(",")[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("method", "size"), [*((method, 3) for method in METHODS), ("acp", 4), ("local", 4)])
def test_random_deaths(tmp_path, method, size):
    """Eight kills and four stops, any time; never the last one that knows the weights."""
    draw = random.Random(f"{method} {size}")
    faults = [signal.SIGKILL] * 8 + [signal.SIGSTOP] * 4
    draw.shuffle(faults)
    with Cluster(tmp_path, size, method, METHODS[method], pause=0.004) as cluster:
        cluster.wait(lambda: all_at(cluster, 3))
        for fault in faults:
            time.sleep(draw.random() * 0.3)
            victim = draw.randrange(size)
            meet(cluster, victim, fault)
        end = furthest(cluster) + 1000
        events = cluster.finish(end, 200)
    commits, conserved, lost = check(events, conserves=method not in ("cast", "diloco"))
    print(f"{method}, {size} groups: {len(faults)} faults, {commits} commits, {conserved} conserved, lost {lost}")
    assert lost <= 1
    losses = {mine[-1]["loss"] for mine in events.values()}
    assert len(losses) == 1
    (tmp_path / "quiet").mkdir()
    with Cluster(tmp_path / "quiet", size, method, METHODS[method], pause=0.0) as quiet:
        quiet.wait(lambda: all_at(quiet, 3))
        undisturbed = quiet.finish(end, 200)
    assert losses.pop() <= 1.02 * undisturbed[0][-1]["loss"]
