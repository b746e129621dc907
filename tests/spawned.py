"""Runs a function on N real Gloo ranks (spawn, a free port, a time limit) and tells hang, signal and failure apart."""

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from pathlib import Path


class RankFailed(AssertionError):
    """Some rank raised, died of a signal, or was late."""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _child(function, rank, size, port, out, args, init):
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        if init:
            dist.init_process_group("gloo")
        result = function(rank, size, *args)
        Path(out, f"{rank}.ok").write_bytes(pickle.dumps(result))
        if init and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        Path(out, f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)


def run(function, size, *args, seconds=60.0, init=True, expect_exit=None):
    """Call ``function(rank, size, *args)`` on every rank. Returns the results in rank order.

    ``expect_exit``: {rank: exit code} of ranks that are meant to end otherwise; their result is None.
    """
    expect_exit = expect_exit or {}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as out:
        port = free_port()
        ranks = [context.Process(target=_child, args=(function, r, size, port, out, args, init)) for r in range(size)]
        for p in ranks:
            p.start()
        deadline = time.monotonic() + seconds
        for p in ranks:
            p.join(max(0.0, deadline - time.monotonic()))
        late = [r for r, p in enumerate(ranks) if p.is_alive()]
        for p in ranks:
            if p.is_alive():
                p.kill()
                p.join()
        problems = []
        if late:
            problems.append(f"hang: ranks {late} were late after {seconds} s")
        results = []
        for r, p in enumerate(ranks):
            wanted = expect_exit.get(r, 0)
            error = Path(out, f"{r}.error")
            if p.exitcode != wanted and r not in late:
                kind = f"signal {-p.exitcode}" if p.exitcode < 0 else f"exit {p.exitcode}"
                problems.append(f"rank {r}: {kind}\n{error.read_text() if error.exists() else ''}")
            ok = Path(out, f"{r}.ok")
            results.append(pickle.loads(ok.read_bytes()) if ok.exists() else None)
        if problems:
            raise RankFailed("\n".join(problems))
        return results
