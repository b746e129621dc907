"""A rank is killed, or frozen, at a random moment of attach or training: every other one ends with one sentence."""

import multiprocessing.connection
import os
import random
import re
import signal
import threading
import time
from datetime import timedelta

import cases
import pytest
import torch
import torch.distributed as dist

import spawned
import thinwire as tw

pytestmark = pytest.mark.dist

METHODS = [
    ("ssgd", {}),
    ("acp", {"rank": 1, "start_compression_step": 0}),
    ("topk", {"density": 0.1, "start_compression_step": 0}),
    ("dear", {}),
    ("cast", {"dtype": "int8"}),
    ("local", {"sync_every": 2, "codec": "int8", "fragment_sync_delay": 0}),
    ("local", {"sync_every": 2, "codec": "int8", "fragment_sync_delay": 1}),
]
TIMEOUT = 6.0
TOGETHER = len(METHODS)  # trials that wait side by side


def _rank(pipe, rank, size, port, method, options, victim, how, moment):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.barrier()
    if rank == victim:
        threading.Timer(moment, os.kill, (os.getpid(), how)).start()
    net = cases.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    sync = None
    try:
        sync = tw.attach(net, optimizer, method, timeout=TIMEOUT, **options)
        for step in range(1_000_000):
            cases.down(cases.loss_of(net, rank, step), optimizer)
            time.sleep(0.005)
    except RuntimeError as error:
        pipe.send(str(error))
    if sync is not None:
        sync.close()


class Trial:
    def __init__(self, draw, number, how):
        self.size = draw.choice((2, 3))
        self.method, self.options = METHODS[number % len(METHODS)]
        self.victim, self.moment = draw.randrange(self.size), draw.uniform(0, 2)
        self.label = (
            f"{self.method} {self.options}, rank {self.victim} of {self.size}, signal {how} after {self.moment:.2f} s"
        )
        port = spawned.free_port()
        self.ranks = []
        for rank in range(self.size):
            here, there = spawned.fork.Pipe(duplex=False)
            arguments = (there, rank, self.size, port, self.method, self.options, self.victim, how, self.moment)
            process = spawned.fork.Process(target=_rank, args=arguments)
            process.start()
            there.close()
            self.ranks.append((process, here))

    def problems(self, deadline):
        """What is wrong with the survivors' ends; everything is cleaned up."""
        found = []
        for rank, (process, pipe) in enumerate(self.ranks):
            if rank == self.victim:
                continue
            multiprocessing.connection.wait([process.sentinel], max(0.0, deadline - time.monotonic()))
            said = None
            if pipe.poll():
                try:
                    said = pipe.recv()
                except EOFError:
                    said = None
            if process.is_alive():
                found.append(f"{self.label}: rank {rank} hangs, having said {said!r}")
            elif process.exitcode != 0:
                found.append(f"{self.label}: rank {rank} ended with {process.exitcode}, having said {said!r}")
            elif said is None or "\n" in said or not self._names_it(said):
                found.append(f"{self.label}: rank {rank} said {said!r}")
        for process, _ in self.ranks:
            if process.is_alive():
                process.kill()
            process.join()
        return found

    def _names_it(self, said):
        return re.search(rf"ank {self.victim}\b", said) or "whoever holds the store" in said


def _trials(count, how, seed):
    draw, problems = random.Random(seed), []
    for first in range(0, count, TOGETHER):
        trials = [Trial(draw, number, how) for number in range(first, min(count, first + TOGETHER))]
        deadline = time.monotonic() + 150  # far more than they take: a hang, not a slow machine, is looked for
        for trial in trials:
            problems += trial.problems(deadline)
    return problems


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_end_with_one_sentence(how):
    assert _trials(TOGETHER, how, 1) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_end_with_one_sentence_many_times(how):
    assert _trials(10 * len(METHODS), how, 2) == []
