"""Runs a function on N real Gloo ranks (spawn, a free port, a time limit) and tells hang, signal and failure apart.

Ranks are kept for the next call, since starting one costs seconds on two cores; every call makes process groups of its
own. Tests about the end of a process, and those whose ranks are meant to die, ask for fresh ones: forks of one process
that has nothing but its imports behind it, which end as a script does.
"""

import atexit
import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import os
import pickle
import socket
import time
import traceback

_spawn = multiprocessing.get_context("spawn")  # rank 0's hash seed is not that of the others, as on other machines
fork = multiprocessing.get_context("forkserver")
fork.set_forkserver_preload(["pytest", "torch._dynamo", "torch.distributed.checkpoint", "thinwire.checkpoint"])
_kept = []
_SHARE = 1000
_FIRST_PORT = 20000 + _SHARE * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 12)  # Linux begins at 32768
_port_numbers = itertools.count(os.getpid())


class RankFailed(AssertionError):
    """Some rank raised, died of a signal, or was late."""


def free_port():
    """A port at which nobody listens, of this test process's share of those that no connection is begun from.

    What ``bind`` gives for port 0 may be the near end of somebody's connection before it is used.
    """
    while True:
        port = _FIRST_PORT + next(_port_numbers) % _SHARE
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def to_itself(address, *_, **options):
    """In place of ``socket.create_connection`` at a free port: the kernel takes the same port for the caller's end."""
    connection = socket.socket()
    connection.bind(address)
    connection.connect(address)
    return connection


def _serve(pipe):
    """A rank's life: calls come through the pipe until it closes."""
    import torch

    torch.set_num_threads(1)
    # Plain DDP dropped right after its last backward can hang in torch 2.13: under the GIL its group waits for Gloo's
    # thread, and that thread for the GIL, to let go of the contextvars that backward keeps for compiled code alone.
    torch._C._stash_obj_in_tls = lambda *_: None
    gc.freeze()  # what was imported: at a process's end, looking through it takes three times as long as all else
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_one(*call)))  # plain bytes: torch would send tensors through shared memory
        last, call = call[-1], None
        if last:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nanobind would list what is frozen
            ctypes.pythonapi.Py_Exit(0)  # what `sys.exit` comes to; a fork's own end would skip what is torn down there


def _one(function, rank, size, port, args, init, fresh):
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    try:
        if init:
            dist.init_process_group("gloo")
            dist.barrier()  # a rank whose part is over at once may not leave before the others have connected to it
        result = function(rank, size, *args)
        if init and dist.is_initialized():
            dist.destroy_process_group()
        return True, result
    except BaseException:
        return False, traceback.format_exc()


class _Rank:
    def __init__(self, context):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.answer = None

    def end(self):
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _dismiss():
    while _kept:
        _kept.pop().end()


atexit.register(_dismiss)


def run(function, size, *args, seconds=150.0, init=True, expect_exit=None, fresh=False):
    """Call ``function(rank, size, *args)`` on every rank. Returns the results in rank order.

    Args:
        expect_exit: {rank: exit code} of ranks that are meant to end otherwise; their result is None.
        fresh: processes of this call alone, whose end is part of the test.
    """
    expect_exit = expect_exit or {}
    fresh = fresh or bool(expect_exit)
    ranks = [_Rank(fork) if fresh else _kept.pop() if _kept else _Rank(fork if r else _spawn) for r in range(size)]
    port = free_port()
    for r, rank in enumerate(ranks):
        rank.answer = None
        rank.pipe.send((function, r, size, port, args, init, fresh))
    deadline = time.monotonic() + seconds
    late, problems = _collect(ranks, deadline, expect_exit)
    if fresh:
        for r, rank in enumerate(ranks):
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.is_alive() and r not in late:
                late.append(r)
    if late:
        problems.insert(0, f"hang: ranks {late} were late after {seconds} s")
    if fresh or problems:
        for r, rank in enumerate(ranks):
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
            code, wanted = rank.process.exitcode, expect_exit.get(r, 0)
            if fresh and code != wanted and r not in late:
                problems.append(f"rank {r}: {f'signal {-code}' if code < 0 else f'exit {code}'}")
    else:
        _kept.extend(ranks)
    if problems:
        raise RankFailed("\n".join(problems))
    return [rank.answer for rank in ranks]


def _collect(ranks, deadline, expect_exit):
    late, problems, waiting = [], [], dict(enumerate(ranks))
    while waiting:
        for r, rank in list(waiting.items()):
            if rank.pipe.poll(0.01):
                try:
                    ok, rank.answer = pickle.loads(rank.pipe.recv_bytes())
                except EOFError:
                    if r not in expect_exit:
                        problems.append(f"rank {r} ended without an answer")
                else:
                    if not ok:
                        problems.append(f"rank {r}: {rank.answer}")
                del waiting[r]
            elif not rank.process.is_alive() and not rank.pipe.poll(0):
                if r not in expect_exit:
                    rank.process.join()
                    problems.append(f"rank {r} ended with exit code {rank.process.exitcode}")
                del waiting[r]
        if waiting and time.monotonic() > deadline:
            late = sorted(waiting)
            break
    return late, problems
