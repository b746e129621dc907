"""``thinwire probe``: what exchanges cost on this network."""

from __future__ import annotations

import json as json_module
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.core.events import python
from thinwire.tools.cli.console import check_output, plain_table, watched_load
from thinwire.tools.cli.errors import RunFailed
from thinwire.tools.cli.ranks import follow, under_torchrun

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.predict.measure import ProbeResult

_SHOWN = (64 << 10, 1 << 20, 16 << 20)


def probe(
    workers: Annotated[
        int | None, typer.Option(help="Total number of ranks; by default 2. Not under torchrun.")
    ] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks that share a node. Not under torchrun.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Rate of each node's emulated link, such as 1gbit. Not under torchrun.")
    ] = None,
    delay: Annotated[str | None, typer.Option(help="One-way delay between nodes. Not under torchrun.")] = None,
    backend: Annotated[str, typer.Option(help="auto, gloo or nccl; in the lab always gloo.")] = "auto",
    max_bytes: Annotated[int, typer.Option(help="Largest message of a rank, in bytes.")] = 16 << 20,
    seconds: Annotated[float, typer.Option(help="Seconds for the exchanges; what does not fit is skipped.")] = 40.0,
    out: Annotated[Path, typer.Option(help="File for the costs.")] = Path("costs.json"),
    json: Annotated[bool, typer.Option("--json", help="Print all measurements as JSON on stdout.")] = False,
) -> None:
    """Measure every collective over message sizes: under torchrun on its network, otherwise in the lab."""
    from rich.console import Console

    from thinwire.core.words import rate
    from thinwire.predict.measure import verdict
    from thinwire.predict.measure.probe import message_sizes

    if backend not in ("auto", "gloo", "nccl"):
        raise ValueError(f"backend {backend!r} is unknown; use auto, gloo or nccl")
    message_sizes(largest=max_bytes)
    if not seconds > 0:
        raise ValueError(f"--seconds must be positive, not {seconds:g}")
    check_output("--out", out)
    note = ""
    if under_torchrun():
        if any(option is not None for option in (workers, ranks_per_node, link, delay)):
            raise ValueError(
                "under torchrun the ranks and the network are fixed: leave out --workers, --link and so on"
            )
        with watched_load(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), quiet=os.environ["RANK"] != "0") as load:
            rank, result = _join(backend, max_bytes, seconds)
        if rank != 0:
            return
    else:
        if backend == "nccl":
            raise ValueError("the lab's ranks use gloo; for nccl start the verb with torchrun")
        workers, ranks_per_node = (2 if workers is None else workers), (1 if ranks_per_node is None else ranks_per_node)
        with watched_load(workers) as load:
            result, note = _in_lab(workers, ranks_per_node, link, delay, max_bytes, seconds)
    costs = result.costs
    out.write_text(costs.to_json() + "\n")
    if json:
        typer.echo(json_module.dumps(load.with_load(json_module.loads(result.to_json()))))
    console = Console(stderr=json)
    if not json:
        flow = result.flow_bits_per_second
        console.print(result.source + (f"; one flow alone: {rate(flow / 8)}" if flow else ""), markup=False)
        for group in dict.fromkeys(key[1:] for key in result.series):
            console.print(probe_table(result, group))
    for sentence in filter(None, [*verdict(result), note]):
        console.print(sentence, markup=False)
    console.print(f"written: {out} ({len(costs.exchanges)} curves, {len(costs.compute)} of compute, {costs.hash})")
    rest = "" if costs.exchanges else " --link 1gbit"
    console.print(f"next: thinwire profile MODEL, then thinwire plan profile.json --costs {out}{rest}", markup=False)


def _join(backend: str, max_bytes: int, seconds: float) -> tuple[int, ProbeResult]:
    """Probe as a rank of torchrun's; the first rank shows the progress."""
    from rich.console import Console

    from thinwire.predict.measure.worker import join_and_probe

    console = Console(stderr=True, quiet=os.environ["RANK"] != "0")
    with console.status("joining the ranks") as status:
        try:
            return join_and_probe(
                backend=backend,
                largest_bytes=max_bytes,
                seconds=seconds,
                on_progress=lambda done, text: status.update(f"{done:4.0%} {text}"),
            )
        except RuntimeError as error:  # torch's message about ranks that do not answer
            raise RunFailed(f"the ranks could not be probed: {str(error).splitlines()[0]}") from error


def _in_lab(
    workers: int, ranks_per_node: int, link: str | None, delay: str | None, max_bytes: int, seconds: float
) -> tuple[ProbeResult, str]:
    from thinwire.predict.measure import ProbeResult
    from thinwire.tools.lab import Cluster

    cluster = Cluster.parse(workers, ranks_per_node, link, delay)
    with tempfile.TemporaryDirectory(prefix="thinwire-probe-") as folder:
        path = Path(folder) / "result.json"
        command = python("-m", "thinwire.predict.measure.worker", "--out", str(path))
        command += ["--largest-bytes", str(max_bytes), "--seconds", str(seconds)]
        launched = follow(cluster, command, timeout_seconds=5 * seconds + 180)
        return ProbeResult.from_json(path.read_text()), launched.note


def probe_table(result: ProbeResult, group: tuple[str, int]) -> Table:
    """Return one line per operation of a group; bandwidths are those of the largest measured message."""
    from thinwire.core.words import duration, size
    from thinwire.predict.measure.result import line_error

    costs, lines = result.costs, result.lines
    series = {key: row for key, row in result.series.items() if key[1:] == group}
    giga = any(m.algbw * 8 >= 1e9 for row in series.values() for m in row)
    unit, name = (1e9, "Gbit/s") if giga else (1e6, "Mbit/s")
    columns = ["operation", "start-up", *map(size, _SHOWN)]
    columns += [f"algbw\n{name}", f"busbw\n{name}", "line\noff", "CPU\nper MB"]
    table = plain_table("{}: groups of {}".format(*group), columns, close=True)
    for key, row in series.items():
        last, share = row[-1], costs.cpu_share.get(key[0])
        cells = [key[0], duration(lines[key].startup_seconds)]
        cells += [("" if n <= last.bytes else "~") + duration(costs.exchanges[key](n)) for n in _SHOWN]
        cells += [f"{bandwidth * 8 / unit:.3g}" for bandwidth in (last.algbw, last.busbw)]
        cells += [f"{line_error(result, key):.0%}"]
        table.add_row(*cells, duration(share.seconds_per_byte * 1e6) if share and group[0] == "world" else "-")
    return table
