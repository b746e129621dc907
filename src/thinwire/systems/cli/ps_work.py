"""What the verbs of ``thinwire ps`` share and torch is needed for: words read, models built, a run repeated; tables."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from thinwire.core.words import counted
from thinwire.systems.link.listener import split_address
from thinwire.systems.parameter_server import DelayedNesterov, Journal, Layout, Settings, preset, replay
from thinwire.systems.parameter_server.outer import Outer, default_outer
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.models.workload import Workload
from thinwire.tools.bench.words import nearest, split_options
from thinwire.tools.cli.console import Bar, plain_table, progress

OUTER: dict[str, Callable[..., Any]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "delayed_nesterov": DelayedNesterov,
}  # fmt: skip


def read_outer(text: str) -> Outer | None:
    """Parse ``sgd:lr=0.1:momentum=0.9``, ``adamw:beta1=0``, ``delayed_nesterov:lr=0.2:period=4``; auto: None."""
    if text == "auto":
        return None
    name, options = split_options(text)
    if name not in OUTER:
        raise ValueError(f"unknown optimizer {name!r}; {nearest(name, OUTER)}")
    words: dict[str, Any] = dict(options)
    if name.startswith("adam"):
        words["betas"] = (float(words.pop("beta1", 0.9)), float(words.pop("beta2", 0.999)))

    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = OUTER[name](params, **words)
        return made

    try:
        make([torch.zeros(1)])
    except TypeError as error:
        raise ValueError(f"--outer {text}: {error}") from error
    return make


def read_settings(text: str, nodes: int) -> Settings:
    return replace(preset(text), start_nodes=nodes)


def check_server(address: str) -> None:
    """Refuse an address whose name nobody knows; one that cannot be looked up at the moment may be known later."""
    host, port = split_address(address)
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        if error.errno != socket.EAI_AGAIN:
            raise ValueError(f"server {address}: the name {host!r} has no address: {error.strerror}") from error


def build(model: str, seed: int) -> Workload:
    torch.set_num_threads(1)
    return build_model(model, seed)


def read_published(words: str) -> Outer | None:
    if not words:
        raise ValueError("the server's optimizer was made in Python: give --outer, or use parameter_server.serve_shard")
    return read_outer(words)


def rank_of(node: int, worker: int) -> int:
    return 64 * node + worker


def replay_file(path: Path, out: Path | None) -> dict[str, Any]:
    """Repeat a recorded run of a bench model. ``ValueError``: it is not a journal, or one of another program."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give the one that --journal wrote")
    journal = Journal.read(path)
    facts = journal.facts
    if "model" not in facts:
        raise ValueError(
            f"{path} does not say which model it belongs to: replay it in Python, see parameter_server.replay"
        )
    if journal.settings.sync_every is not None:
        raise ValueError(
            f"{path} is of local steps, and does not know their loops and optimizers: it cannot be repeated"
        )
    workload = build(facts["model"], facts["seed"])
    network, layout = workload.model, Layout.of(workload.model)

    def gradient(theta: Tensor, node: int, worker: int, batch: int) -> Tensor:
        layout.write(theta, network)
        network.zero_grad()
        workload.loss(network, batch, rank_of(node, worker)).backward()
        return layout.gradient(network)

    outer = read_outer(facts["outer"]) or default_outer(journal.settings, facts["nodes"])
    with progress("updates", len(journal.updates)) as shown:
        theta = replay(journal, layout.flat(network), gradient, outer, on_update=shown)
    if out is not None:
        torch.save({"theta": theta, "version": len(journal.updates)}, out)
    digest = weights_hash(theta)
    return {"updates": len(journal.updates), "hash": digest, "deterministic": journal.settings.deterministic}


def weights_hash(theta: Tensor) -> str:
    return hashlib.blake2b(theta.detach().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def status_table(status: dict[str, Any]) -> Table:
    counters = status["counters"]
    words = [f"{name} {counters[name]}" for name in ("joined", "left", "late", "lost") if name in counters]
    words += [f"node {node['node']}: {node['cut']} changes cut" for node in status["nodes"] if node["cut"]]
    for shard in status["shards"]:
        bytes_ = f"{shard['up_bytes'] / 1e6:.1f} MB up, {shard['down_bytes'] / 1e6:.1f} down"
        words.append(f"shard {shard['index']} " + (bytes_ if shard["there"] else "has not connected yet"))
    rows = (
        (
            str(node["node"]), str(node["alive"]), str(node["seen"]),
            "idle" if node["behind"] < 0 else str(node["behind"]), f"{node['step_seconds']:.3f} s",
            f"{node['up_bytes'] / 1e6:.1f}", f"{node['down_bytes'] / 1e6:.1f}",
        )
        for node in status["nodes"]
    )  # fmt: skip
    columns = ("node", "workers", "rounds seen", "behind", "step", "MB up", "MB down")
    return plain_table(_head(status), columns, rows, caption="; ".join(words))


def _head(status: dict[str, Any]) -> str:
    loss = status["loss"]
    rate = status["gradients"] / max(status["seconds"], 1e-9)
    return (
        f"version {status['version']}, {status['gradients']} gradients, {rate:.1f}/s, staleness "
        f"{status['mean_staleness']:.2f}" + (f", loss {loss:.3f}" if loss is not None else "")
    )


@contextmanager
def live(begins: str, quiet: bool) -> Iterator[tuple[Bar, Callable[[dict[str, Any]], None]]]:
    """Yield a bar, and what shows a server's status: as a table of its nodes or, without a terminal, now and then."""
    tables: list[Table] = []
    with progress(begins, quiet=quiet, table=lambda: tables[-1] if tables else None) as bar:

        def show(status: dict[str, Any]) -> None:
            if status["nodes"]:  # once all have left, the last table with a node in it stays
                tables[:] = [status_table(status)]
            bar(description=f"{status['seconds']:.0f} s: {_head(status)}, {counted(len(status['nodes']), 'node')}")

        yield bar, show


def prediction_table(rows: list[dict[str, Any]]) -> Table:
    columns = ("scheme", "gradients/s", "updates/s", "staleness, max", "MB a gradient")
    cells = (
        (
            row["scheme"], f"{row['gradients_per_second']:.2f}", f"{row['updates_per_second']:.2f}",
            f"{row['mean_staleness']:.2f}, {row['max_staleness']:2d}", f"{row['bytes_per_gradient'] / 1e6:.2f}",
        )
        for row in rows
    )  # fmt: skip
    return plain_table("predicted in virtual time, not measured", columns, cells, close=True)
