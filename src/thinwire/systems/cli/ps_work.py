"""The verbs of ``thinwire ps`` within one process: serve, keep a shard, lead a node, work, replay."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.events import python
from thinwire.tools.cli.console import RunFailed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from thinwire.systems.parameter_server import Service, Settings, Worker
    from thinwire.systems.parameter_server.outer import Outer
    from thinwire.tools.bench.models.workload import Workload

_RESTARTS = 20


def build(model: str, seed: int) -> Workload:
    """Build a model of the bench, with one thread."""
    import torch

    from thinwire.tools.bench.models.registry import build_model

    torch.set_num_threads(1)
    return build_model(model, seed)


def read_outer(text: str) -> Outer | None:
    """Parse ``sgd:lr=0.1:momentum=0.9``, ``adamw:lr=1e-3:beta1=0``, ``delayed_nesterov:lr=0.2:period=4``; auto: None.

    Raises:
        ValueError: there is no such optimizer or option.
    """
    import torch

    from thinwire.systems.parameter_server import DelayedNesterov
    from thinwire.tools.bench.words import nearest, split_options

    if text == "auto":
        return None

    def with_betas(kind: Callable[..., Any]) -> Callable[..., Any]:
        return lambda p, beta1=0.9, beta2=0.999, **options: kind(p, betas=(float(beta1), float(beta2)), **options)

    kinds: dict[str, Callable[..., Any]] = {
        "sgd": torch.optim.SGD,
        "adam": with_betas(torch.optim.Adam),
        "adamw": with_betas(torch.optim.AdamW),
        "delayed_nesterov": DelayedNesterov,
    }
    name, options = split_options(text)
    if name not in kinds:
        raise ValueError(f"unknown optimizer {name!r}; {nearest(name, kinds)}")

    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = kinds[name](params, **options)
        return made

    try:
        make([torch.zeros(1)])
    except TypeError as error:
        raise ValueError(f"--outer {text}: {error}") from error
    return make


def read_settings(text: str, nodes: int) -> Settings:
    """Return a preset that waits for that many nodes."""
    from dataclasses import replace

    from thinwire.systems.parameter_server import preset

    return replace(preset(text), start_nodes=nodes)


def check_words(model: str, settings: str, outer: str, nodes: int) -> None:
    """Refuse impossible settings before any output or process."""
    from thinwire.tools.bench.models.registry import check_model

    check_model(model)
    read_settings(settings, nodes)
    read_outer(outer)


def make_service(model: str, settings: str, outer: str, *, nodes: int, seed: int, **options: Any) -> Service:
    """Build the server of a model of the bench."""
    from thinwire.systems.parameter_server import Service

    workload = build(model, seed)
    facts = {"model": model, "seed": seed, "outer": outer, "nodes": nodes}
    return Service(
        workload.model, read_settings(settings, nodes), outer=read_outer(outer), outer_text=outer, nodes=nodes,
        facts=facts, **options,
    )  # fmt: skip


def check_shards(shards: int) -> None:
    """Refuse an impossible number."""
    if shards < 0:
        raise ValueError(f"--shards {shards} must be at least 0")


def check_server(address: str) -> None:
    """Refuse an address whose name nobody knows; one that cannot be looked up at the moment may be known later."""
    from thinwire.systems.link.meeting import split_address

    host, port = split_address(address)
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        if error.errno != socket.EAI_AGAIN:
            raise ValueError(f"server {address}: the name {host!r} has no address: {error.strerror}") from error


def read_secret_file(path: Path | None) -> bytes | None:
    """Return the secret of ``--secret-file``, if there is one."""
    from thinwire.systems.link.secret import read_secret

    return None if path is None else read_secret(path)


def run_shard(
    server: str, index: int, outer: str | None, port: int, checkpoint_dir: Path | None, **options: Any
) -> dict[str, Any]:
    """Run one shard until the training ends; ``options`` are those of :class:`Shard` that say who may connect.

    Raises:
        ValueError: invalid options, or a checkpoint that is not the server's.
    """
    import torch

    from thinwire.systems.parameter_server import Shard

    torch.set_num_threads(1)
    if index < 0:
        raise ValueError(f"--index {index} must be at least 0")
    check_server(server)
    made = None if outer is None else read_outer(outer)
    words = _published if outer is None else None
    shard = Shard(server, index, outer=made, read_outer=words, checkpoint_dir=checkpoint_dir, port=port, **options)
    print(f"shard {index}, for the server at {server}", file=sys.stderr, flush=True)
    return {"index": index, "version": shard.run()}


def _published(words: str) -> Outer | None:
    """Build the optimizer that a server's text describes."""
    if not words:
        raise ValueError("the server's optimizer was made in Python: give --outer, or use parameter_server.serve_shard")
    return read_outer(words)


def rank_of(node: int, worker: int) -> int:
    """Return which part of the data a worker draws."""
    return 64 * node + worker


def make_worker(
    leader: str, number: int, model: str, node: int, *, slowdown: float, pace: float, seed: int,
    check: Callable[[], object] = lambda: None, secret: bytes | None = None, keys: Path | None = None,
) -> Worker:  # fmt: skip
    """Build a worker on a model of the bench."""
    from thinwire.systems.parameter_server import Worker

    workload = build(model, seed)

    def loss(network: nn.Module, step: int) -> Tensor:
        return workload.loss(network, step, rank_of(node, number))

    return Worker(
        workload.model, lambda step: step, loss, leader, number, slowdown=slowdown, pace_seconds=pace, check=check,
        secret=secret, keys=keys,
    )  # fmt: skip


def run_node(
    server: str, model: str, number: int | None, workers: int, *, slowdown: float = 1.0, pace: float = 0.0,
    seed: int = 0, secret_file: Path | None = None, keys: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run a leader with its workers: one in this process, or several in their own processes.

    Raises:
        RunFailed: a worker died too often.
    """
    from thinwire.core.secret_file import VARIABLE
    from thinwire.systems.link.secret import find_trust
    from thinwire.systems.parameter_server import Node
    from thinwire.tools.bench.models.registry import check_model

    if workers < 1:
        raise ValueError(f"--workers {workers} must be at least 1")
    if number is None:
        number = zlib.crc32(socket.gethostname().encode()) & 0xFFFF
    check_server(server)
    check_model(model)
    secret = read_secret_file(secret_file)
    find_trust(secret, keys)  # refuses unusable secrets or keys before any output
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if secret_file is not None:
        environment[VARIABLE] = str(secret_file.absolute())
    children: dict[int, subprocess.Popen[bytes]] = {}
    node = None
    print(f"node {number}, for the server at {server}", file=sys.stderr, flush=True)
    try:
        node = Node(server, number, workers, secret=secret, keys=keys)
        if workers == 1:
            worker = make_worker(
                node.address, 0, model, number, slowdown=slowdown, pace=pace, seed=seed, check=lambda: node.wait(0),
                secret=secret, keys=keys,
            )  # fmt: skip
            stats = worker.run()
            node.wait(5.0)
            return {"node": number, "end": "training has ended", "submissions": stats.submissions, "restarts": 0}
        restarts = -workers
        while not node.wait(0.2):
            for k in range(workers):
                if k not in children or children[k].poll() is not None:
                    restarts += 1
                    if restarts > _RESTARTS:
                        raise RunFailed(f"workers of node {number} died {restarts} times; see their output above")
                    command = python("-c", "from thinwire.tools.cli.main import run; run()", "ps", "worker")
                    command += [node.address, str(k), model, str(number)]
                    command += ["--slowdown", str(slowdown), "--seed", str(seed), "--pace", str(pace)]
                    command += [] if keys is None else ["--keys", str(keys)]
                    children[k] = subprocess.Popen(command, env=environment)
        _await(children)
        return {"node": number, "end": "training has ended", "restarts": restarts}
    finally:
        if node is not None:
            node.close()
        for child in children.values():
            if child.poll() is None:
                child.kill()
                child.wait()


def _await(children: dict[int, subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + 10.0
    while time.monotonic() < end and any(child.poll() is None for child in children.values()):
        time.sleep(0.05)


def replay_file(path: Path, out: Path | None) -> dict[str, Any]:
    """Repeat a recorded run of a bench model.

    Raises:
        ValueError: it is not a journal, or one of another program.
    """
    import torch

    from thinwire.systems.parameter_server import Journal, Layout, replay
    from thinwire.systems.parameter_server.outer import default_outer
    from thinwire.tools.cli.console import progress

    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the file that --journal wrote")
    journal = Journal.read(path)
    facts = journal.facts
    if "model" not in facts:
        raise ValueError(
            f"{path} does not say which model it belongs to: replay it in Python, see parameter_server.replay"
        )
    workload = build(facts["model"], facts["seed"])
    network, layout = workload.model, Layout.of(workload.model)
    start = layout.flat(network)

    def gradient(theta: Tensor, node: int, worker: int, batch: int) -> Tensor:
        layout.write(theta, network)
        network.zero_grad()
        workload.loss(network, batch, rank_of(node, worker)).backward()
        return layout.gradient(network)

    outer = read_outer(facts["outer"]) or default_outer(journal.settings, facts["nodes"])
    with progress("updates", len(journal.updates)) as shown:
        theta = replay(journal, start, gradient, outer, full=facts["nodes"], on_update=shown)
    if out is not None:
        torch.save({"theta": theta, "version": len(journal.updates)}, out)
    digest = weights_hash(theta)
    return {"updates": len(journal.updates), "hash": digest, "deterministic": journal.settings.deterministic}


def weights_hash(theta: Tensor) -> str:
    """Return a short hash of the bits of the weights."""
    return hashlib.blake2b(theta.detach().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
