"""``thinwire probe`` and ``thinwire profile``: what exchanges cost on a network, and how long a model computes."""

from __future__ import annotations

import json as json_module
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.core.events import python, tell_event
from thinwire.tools.cli.console import (
    Device,
    Json,
    Model,
    RunFailed,
    check_output,
    follow,
    plain_table,
    progress,
    under_torchrun,
    watched_load,
)

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.core.pricing.profiles import ModelProfile
    from thinwire.predict.measure import ProbeResult
    from thinwire.tools.lab import Cluster


_SHOWN = (64 << 10, 1 << 20, 16 << 20)
_ROWS = 12
_SECONDS = 40.0


def probe(
    workers: Annotated[
        int | None, typer.Option(help="Total number of ranks; by default 2. Not under torchrun.")
    ] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks that share a node. Not under torchrun.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Rate of each node's emulated link, such as 1gbit. Not under torchrun.")
    ] = None,
    delay: Annotated[str | None, typer.Option(help="One-way delay between nodes. Not under torchrun.")] = None,
    jitter: Annotated[
        str | None, typer.Option(help="By how much a packet's delay may differ. Not under torchrun.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="Share of packets that get lost. Not under torchrun.")] = None,
    congestion: Annotated[str | None, typer.Option(help="TCP's congestion control. Not under torchrun.")] = None,
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
    from thinwire.tools.lab import Cluster

    if backend not in ("auto", "gloo", "nccl"):
        raise ValueError(f"backend {backend!r} is unknown; use auto, gloo or nccl")
    message_sizes(largest=max_bytes)
    if not seconds > 0:
        raise ValueError(f"--seconds must be positive, not {seconds:g}")
    check_output("--out", out)
    note = ""
    if under_torchrun():
        if any(option is not None for option in (workers, ranks_per_node, link, delay, jitter, loss, congestion)):
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
            cluster = Cluster.parse(workers, ranks_per_node, link, delay, jitter, loss, congestion)
            result, note = _in_lab(cluster, max_bytes, seconds)
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


def _in_lab(cluster: Cluster, max_bytes: int, seconds: float) -> tuple[ProbeResult, str]:
    from thinwire.predict.measure import ProbeResult

    with tempfile.TemporaryDirectory(prefix="thinwire-probe-") as folder:
        path = Path(folder) / "result.json"
        command = python("-m", "thinwire.predict.measure.worker", "--out", str(path))
        command += ["--largest-bytes", str(max_bytes), "--seconds", str(seconds)]
        launched = follow(cluster, command, timeout_seconds=5 * seconds + 180)
        return ProbeResult.from_json(path.read_text()), launched.note


def probe_table(result: ProbeResult, group: tuple[str, int]) -> Table:
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


def profile(
    model: Model,
    steps: Annotated[int, typer.Option(help="Timed steps; fewer if they take more than 40 s.")] = 20,
    warmup: Annotated[int, typer.Option(help="Untimed steps before the timed ones.")] = 5,
    workers: Annotated[
        int, typer.Option(help="Processes that compute at the same time, as on a machine with that many ranks.")
    ] = 1,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="File for the profile.")] = Path("profile.json"),
    json: Json = False,
) -> None:
    """Time a model's forward pass by module and its backward pass by gradient."""
    from rich.console import Console

    from thinwire.tools.bench.device import check_device
    from thinwire.tools.bench.models.registry import check_model

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("thinwire profile starts its own processes: use --workers instead of torchrun")
    if steps < 1 or warmup < 0 or workers < 1:
        raise ValueError(f"--steps {steps} and --workers {workers} must be at least 1, --warmup {warmup} not negative")
    check_output("--out", out)
    check_device(device)
    check_model(model)
    with watched_load(workers) as load:
        if workers > 1:
            found = _several(model, steps, warmup, device, workers)
        else:
            with progress(f"building {model}", steps + warmup) as bar:
                tell = lambda done, total: bar(completed=done, description=model)  # noqa: E731
                found = _profile(model, steps, warmup, device, 0, 1, tell)
    text = json_module.dumps(load.with_load(json_module.loads(found.to_json())))
    out.write_text(text + "\n")
    console = Console(stderr=json)
    if json:
        typer.echo(text)
    else:
        console.print(profile_table(found))
    for sentence in profile_sentences(found):
        console.print(sentence, markup=False)
    console.print(f"written: {out} ({found.hash})")
    console.print(f"next: thinwire probe, then thinwire plan {out} --costs costs.json", markup=False)


def _profile(
    model: str, steps: int, warmup: int, device: str, rank: int, ranks: int, on_step: Callable[[int, int], None]
) -> ModelProfile:
    import torch

    from thinwire.predict.measure import profile_model
    from thinwire.tools.bench.device import rank_device
    from thinwire.tools.bench.models.registry import build_model, loss_of

    # On "cpu" a model stays where its own function puts it: nothing is exchanged, so it may be anywhere.
    workload = build_model(model, device=None if device == "cpu" else rank_device(device))
    batch = workload.describe
    if ranks > 1:
        batch += f", {ranks} processes at once"
        torch.distributed.barrier()
    return profile_model(workload.model, count(), loss_of(workload, rank), steps=steps, warmup=warmup,
                         name=workload.name, batch=batch, seconds=_SECONDS, on_step=on_step)  # fmt: skip


def _several(model: str, steps: int, warmup: int, device: str, ranks: int) -> ModelProfile:
    """Return the profile of the slowest of several processes that compute at the same time."""
    from thinwire.core.pricing.profiles import ModelProfile
    from thinwire.tools.lab import Cluster

    with tempfile.TemporaryDirectory(prefix="thinwire-profile-") as folder:
        what = json_module.dumps([model, steps, warmup, device])
        follow(Cluster(ranks, ranks), python("-m", "thinwire.tools.cli.measure", folder, what), timeout_seconds=600)
        profiles = [ModelProfile.from_json(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return max(profiles, key=lambda p: p.forward_seconds + sum(p.backward_seconds))


def main(folder: str, what: str) -> None:
    """Be one of several processes that are profiled, with torchrun's environment variables set."""
    import torch.distributed as dist

    from thinwire.tools.bench.device import prepare_rank

    model, steps, warmup, device = json_module.loads(what)
    dist.init_process_group(prepare_rank(device))
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def report(done: int, total: int) -> None:
        if rank == 0:
            tell_event({"done": done / total, "text": model})

    found = _profile(model, steps, warmup, device, rank, ranks, report)
    (Path(folder) / f"{rank}.json").write_text(found.to_json())
    dist.barrier()
    dist.destroy_process_group()


def profile_table(profile: ModelProfile) -> Table:
    from thinwire.core.words import duration

    forward = {m.name: m.forward_seconds for m in profile.modules}
    backward, elements = dict.fromkeys(forward, 0.0), dict.fromkeys(forward, 0)
    for tensor in profile.tensors:
        backward[tensor.module] = backward.get(tensor.module, 0.0) + tensor.backward_seconds
        elements[tensor.module] = elements.get(tensor.module, 0) + tensor.size
    longest = sorted(backward, key=lambda name: -(backward[name] + forward.get(name, 0.0)))[:_ROWS]
    table = plain_table(f"{profile.name}: {profile.source}", ("module", "elements", "forward", "backward"))
    for name in backward:
        if name in longest:
            cells = [f"{elements[name]:,}" if name in elements else "-", duration(forward.get(name, 0.0))]
            table.add_row(name or "(the model itself)", *cells, duration(backward[name]))
    if len(backward) > len(longest):
        table.add_row(f"and {len(backward) - len(longest)} more", "", "", "", style="dim")
    total = (f"{profile.elements:,}", duration(profile.forward_seconds), duration(sum(profile.backward_seconds)))
    table.add_section()
    table.add_row("all", *total)
    return table


def profile_sentences(profile: ModelProfile) -> list[str]:
    from thinwire.core.words import rate

    backward, count = sum(profile.backward_seconds), profile.elements * profile.dtype_bytes
    said = [f"{len(profile.tensors)} gradients, {count / 1e6:.1f} MB a step"]
    if backward:
        said.append(
            f"backward could hide the exact average of 2 ranks from {rate(count / backward)} on, of many from "
            f"{rate(2 * count / backward)}; start-ups come on top"
        )
    return said


if __name__ == "__main__":
    main(*sys.argv[1:])
