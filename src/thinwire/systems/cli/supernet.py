"""``thinwire supernet``: train a stereo network of many sizes, and cut it to a latency."""

from __future__ import annotations

import json as json_module
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.core.checks import meant
from thinwire.tools.cli.console import (
    Json,
    RunFailed,
    check_folder,
    check_output,
    plain_table,
    progress,
    torchrun_group,
    watched_load,
)

if TYPE_CHECKING:
    from thinwire.core.program import Method
    from thinwire.systems.supernet import Evolution, SubNet
    from thinwire.systems.supernet.search import Candidate, SearchResult
    from thinwire.systems.supernet.stereo import ElasticStereo, LatencyTable, Pairs, Phase
    from thinwire.systems.supernet.stereo.evaluation import Calibrated
    from thinwire.tools.pictures import Picture


app = typer.Typer(
    help="EASNet: one stereo network whose kernels, depth, width and scales can be cut.", no_args_is_help=True
)

Data = Annotated[
    str, typer.Option(help="dots, planes, scenes (synthetic), or a file with lines: left right disparity.")
]
Size = Annotated[str, typer.Option(help="Height x width of the images, or of the crops if pairs are files.")]
MaxDisparity = Annotated[float, typer.Option(help="Largest disparity of synthetic pairs, in pixels.")]
Threads = Annotated[int, typer.Option(min=1, help="Number of torch's threads, on which latencies depend.")]
_CALIBRATION, _BATCH = 80, 20


@app.command(epilog="Example: thinwire supernet train --out run --data dots")
def train(
    out: Annotated[Path, typer.Option(help="Folder for the network and its checkpoints; run again to continue.")],
    config: Annotated[str, typer.Option(help="tiny or published.")] = "tiny",
    deformable: Annotated[int | None, typer.Option(help="Modules with deformable convolutions.")] = None,
    elastic_refinement: Annotated[
        bool, typer.Option("--elastic-refinement", help="Extension: the refinement can be cut too.")
    ] = False,
    data: Data = "dots",
    held_out: Annotated[str, typer.Option(help="Pairs to measure the error on; by default more synthetic pairs.")] = "",
    size: Size = "48x96",
    max_disparity: MaxDisparity = 15.0,
    steps: Annotated[str, typer.Option(help="Steps of the large and of the shrinking phase.")] = "300,300",
    epoch: Annotated[
        int | None, typer.Option(help="Run the published phases instead, with epochs of this many steps.")
    ] = None,
    sub_nets: Annotated[int, typer.Option(help="Sub-networks per step of the shrinking phase.")] = 2,
    batch_size: Annotated[int, typer.Option(help="Pairs per rank and step.")] = 4,
    method: Annotated[
        str, typer.Option(help="active, dense, or a method for the active part: cast, topk:density=0.01.")
    ] = "active",
    sampling: Annotated[str, typer.Option(help="shared (all ranks run the same sub-networks) or per-rank.")] = "shared",
    divisor: Annotated[str, typer.Option(help="world, or participants with per-rank sampling.")] = "world",
    semantics: Annotated[
        str, typer.Option(help="Unused weights: skip leaves them, zero lets Adam move them.")
    ] = "skip",
    seed: Annotated[int, typer.Option(help="Seed of weights, pairs and draws.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
    threads: Threads = 1,
    json: Json = False,
) -> None:
    """Train all sub-networks, on the ranks of torchrun or of ``thinwire lab run``, or in one process."""
    import torch
    from rich.console import Console

    from thinwire.systems.supernet.stereo import batches, save_net, shrink
    from thinwire.systems.supernet.stereo.evaluation import Calibrated, constant_guess
    from thinwire.systems.supernet.stereo.training import total

    shape = parse_size(size)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    net = make_net(config, deformable, elastic_refinement)
    if max_disparity >= net.max_disparity and data in ("dots", "planes", "scenes"):
        raise ValueError(
            f"--max-disparity {max_disparity:g} must be below {net.max_disparity}, the most that {config} can see"
        )
    phases = make_phases(net, config, steps, epoch, sub_nets)
    chosen = parse_method(method)
    training = parse_pairs(data, shape, max_disparity, 4096, seed)
    testing = parse_pairs(held_out or data, shape, max_disparity, 32, seed + 1)
    check_folder(out)
    with torchrun_group() as (rank, _), progress("training", total(phases), quiet=rank > 0) as bar:
        before = {phase.name: sum(p.steps for p in phases[:i]) for i, phase in enumerate(phases)}

        def on_step(phase: Any, step: int, report: Any) -> None:
            if not bar.completed and before[phase.name] + step:
                bar.say(f"continuing from step {before[phase.name] + step}", "")
            words = f"{phase.name}, loss {report.loss:.3f}, {report.share:.0%} active"
            bar(completed=before[phase.name] + step + 1, description=words)

        try:
            report = shrink(
                net, training, phases, batch=batch_size, method=chosen, sampling=sampling, divisor=divisor,
                semantics=semantics, seed=seed, checkpoint_dir=out / "checkpoints", checkpoint_every=checkpoint_every,
                on_step=on_step,
            )  # fmt: skip
        except (RuntimeError, OSError) as error:
            raise RunFailed(str(error)) from error
    if rank:
        return
    calibration = [training[i] for i in range(min(_CALIBRATION, len(training)))]
    known = list(batches(testing, 8))
    score = Calibrated(net, list(batches(calibration, _BATCH)), known)
    guess = constant_guess(known, net.max_disparity)
    with progress("evaluating"):
        found = {name: score.metrics(sub_net) for name, sub_net in corners(net).items()}
    save_net(net, out / "net.pt")
    result = {
        "net": str(out / "net.pt"),
        **report.to_dict(),
        "constant_guess_epe": guess,
        "corners": {name: {"epe": m.epe, "bad3": m.bad3, "d1": m.d1} for name, m in found.items()},
    }
    (out / "report.json").write_text(json_module.dumps(result, indent=1) + "\n")
    if json:
        typer.echo(json_module.dumps(result))
        return
    console = Console()
    if not any(phase.done for phase in report.phases):
        console.print(f"all {total(phases)} steps had been done before; the network is evaluated again")
    _corner_table(console, net, found, guess)
    for phase in report.phases:
        if phase.bytes_sent:
            console.print(
                f"{phase.name}: {phase.bytes_sent / 1e6:.2f} MB sent per rank, the whole gradient would be "
                f"{phase.dense_bytes / 1e6:.2f} MB; {phase.mean_share:.0%} of the gradient active"
            )
    console.print(f"written: {out / 'net.pt'}; next: thinwire supernet search {out / 'net.pt'}", markup=False)


def _corner_table(console: Any, net: ElasticStereo, found: dict[str, Any], guess: float) -> None:
    table = plain_table("held-out pairs", ("sub-network", "parameters", "end-point error", "> 3 px"))
    for name, metrics in found.items():
        size = sum(p.numel() for p in net.extract(corners(net)[name]).parameters())
        table.add_row(name, f"{size:,}", f"{metrics.epe:.2f} px", f"{metrics.bad3:.1%}")
    table.add_row("constant guess", "", f"{guess:.2f} px", "")
    console.print(table)


@app.command(epilog="Example: thinwire supernet table run/net.pt")
def table(
    net: Annotated[
        Path | None, typer.Argument(help="A network that train wrote; by default an untrained one of --config.")
    ] = None,
    config: Annotated[str, typer.Option(help="tiny or published; weights do not matter here.")] = "published",
    elastic_refinement: Annotated[
        bool, typer.Option("--elastic-refinement", help="Extension: the refinement can be cut too.")
    ] = False,
    size: Size = "96x192",
    repeats: Annotated[int, typer.Option(help="Timed calls of each part.")] = 10,
    threads: Threads = 1,
    out: Annotated[Path | None, typer.Option(help="File for the table, for search.")] = None,
    json: Json = False,
) -> None:
    """Measure the latency of every part on this device; the smallest and the largest network first."""
    import torch
    from rich.console import Console

    from thinwire.systems.supernet.stereo import load_net

    check_output("--out", out)
    torch.set_num_threads(threads)
    made = load_net(net) if net is not None else make_net(config, None, elastic_refinement)
    with watched_load(threads) as load:
        found = _measure(made, size, repeats)
    text = json_module.dumps(load.with_load(json_module.loads(found.to_json())))
    if out is not None:
        out.write_text(text + "\n")
    if json:
        typer.echo(text)
        return
    console = Console()
    _range(console, made, found)
    title = f"milliseconds on {found.device}, {found.threads} thread(s), one pair of {size}"
    lines = plain_table(title, ("part", "median", "p90"))
    for scales, timing in found.aggregation.items():
        lines.add_row(f"volumes and aggregation, {scales} scales", f"{timing.p50:.2f}", f"{timing.p90:.2f}")
    for cut, timing in found.refinement.items():
        lines.add_row(f"refinement, {cut}", f"{timing.p50:.2f}", f"{timing.p90:.2f}")
    for key, timing in found.blocks.items():
        stage, place, kernel, expand = key.split(".")
        words = f"stage {stage}, {'first' if place == '0' else 'later'} block, kernel {kernel}, expansion {expand}"
        lines.add_row(words, f"{timing.p50:.2f}", f"{timing.p90:.2f}")
    console.print(lines)


def _measure(net: ElasticStereo, size: str, repeats: int) -> LatencyTable:
    from thinwire.systems.supernet.stereo import build_table

    with progress("measuring parts") as bar:
        return build_table(net, parse_size(size), repeats, on_part=bar)


def _range(console: Any, net: ElasticStereo, found: LatencyTable) -> None:
    low, high = (found.predict(n) for n in (net.space.smallest, net.space.largest))
    console.print(
        f"smallest network {low:.2f} ms, largest {high:.2f} ms: {high / low:.2f} times as long "
        f"(parts summed, times {found.factor:.2f}; off by up to {found.error:.0%} on 8 whole networks)"
    )


@app.command(epilog="Example: thinwire supernet search run/net.pt")
def search(
    net: Annotated[Path, typer.Argument(help="A network that train wrote.")],
    limit_ms: Annotated[
        float | None,
        typer.Option(
            help="Latency of one pair on this device; by default half-way between smallest and largest network."
        ),
    ] = None,
    size: Size = "48x96",
    data: Data = "dots",
    held_out: Annotated[str, typer.Option(help="Pairs to measure the error on; by default more synthetic pairs.")] = "",
    max_disparity: MaxDisparity = 15.0,
    population: Annotated[int, typer.Option(help="Sub-networks per generation.")] = 32,
    generations: Annotated[int, typer.Option(help="Generations after the first.")] = 8,
    repeats: Annotated[int, typer.Option(help="Timed calls of each part and each finalist.")] = 10,
    latency: Annotated[Path | None, typer.Option("--table", help="A file from thinwire supernet table.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the evolution.")] = 0,
    threads: Threads = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default next to the network.")] = None,
    json: Json = False,
) -> None:
    """Find the best sub-network within a limit of measured latency; the ranks of torchrun share the evaluations."""
    import torch
    from rich.console import Console

    from thinwire.engine.attach import attach
    from thinwire.systems.supernet import Evolution
    from thinwire.systems.supernet.search import search as program
    from thinwire.systems.supernet.stereo import LatencyTable, batches, load_net, measure_net, save_net
    from thinwire.systems.supernet.stereo.evaluation import Calibrated
    from thinwire.tools.pictures import write_picture

    torch.set_num_threads(threads)
    if limit_ms is not None and not (limit_ms > 0 and math.isfinite(limit_ms)):
        raise ValueError(f"--limit-ms {limit_ms} must be above 0")
    evolution = Evolution(population, generations, seed=seed)
    shape, made = parse_size(size), load_net(net)
    folder = out or net.absolute().parent
    check_folder(folder)
    training = parse_pairs(data, shape, max_disparity, _CALIBRATION, seed)
    testing = parse_pairs(held_out or data, shape, max_disparity, 32, seed + 1)
    first = [training[i] for i in range(min(_CALIBRATION, len(training)))]
    score = Calibrated(made, list(batches(first, _BATCH)), list(batches(testing, 8)))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with torchrun_group() as (rank, world), watched_load(threads * ranks, quiet=rank > 0) as load:
        sync = attach(made, torch.optim.SGD(made.parameters(), lr=0.0))
        if latency is not None:
            timings = LatencyTable.from_json(latency.read_text())
            if timings.size != shape:
                raise ValueError(f"{latency} is for images of {timings.size[0]}x{timings.size[1]}, not {size}")
        else:
            timings = _measure(made, size, repeats)
        # rank 0's: the limit must exclude the same sub-networks everywhere
        timings = LatencyTable.from_json(sync.services.gather(timings.to_json().encode())[0].decode())
        if limit_ms is None:
            limit_ms = round((timings.predict(made.space.smallest) + timings.predict(made.space.largest)) / 2, 2)
        if rank == 0:
            _cost(Console(stderr=True), made, score, limit_ms, evolution, world)
        with progress("searching", generations + 1, quiet=rank > 0) as bar:

            def on_generation(number: int, best: Any) -> None:
                words = f"best {-best.fitness:.3f} px, {best.predicted_ms:.1f} ms"
                bar(completed=number + 1, description=words)

            found = sync.services.run(
                program(
                    made.space, score, limit_ms, timings.predict, lambda n: measure_net(made, n, shape, repeats).p50,
                    evolution, rank=rank, world=world, canonical=made.canonical, on_generation=on_generation,
                )
            )  # fmt: skip
        sync.close()
    if rank:
        return
    best = found.best
    metrics = score.metrics(best.sub_net)  # leaves the statistics of this sub-network in the file
    save_net(made, folder / "calibrated.pt")
    result = {
        "sub_net": json_module.loads(best.sub_net.to_json()),
        "epe": metrics.epe, "bad3": metrics.bad3, "limit_ms": limit_ms, "measured_ms": best.measured_ms,
        "predicted_ms": best.predicted_ms, "table_error": timings.error, "evaluated": len(found.archive),
        "parameters": sum(p.numel() for p in made.extract(best.sub_net).parameters()),
        "picture": asdict(picture := _picture(found, limit_ms)),
        "pareto": [{"ms": c.predicted_ms, "epe": -c.fitness} for c in found.pareto()],
    }  # fmt: skip
    result = load.with_load(result)
    (folder / "best.json").write_text(json_module.dumps(result, indent=1) + "\n")
    console = Console(stderr=json)
    try:
        write_picture(picture, folder / "pareto.png")
        console.print(f"written: {folder / 'pareto.png'}", markup=False)
    except ValueError as error:
        console.print(f"no picture: {error}", markup=False)
    if json:
        typer.echo(json_module.dumps(result))
        return
    _range(console, made, timings)
    console.print(
        f"answer: {best.sub_net}\n{result['parameters']:,} parameters, end-point error {metrics.epe:.3f} px; measured "
        f"{best.measured_ms:.2f} ms (predicted {best.predicted_ms:.2f}), limit {limit_ms:g} ms; "
        f"{len(found.archive)} of {made.space.count():,} sub-networks evaluated",
        markup=False,
    )
    console.print(f"written: {folder / 'best.json'}, {folder / 'calibrated.pt'}", markup=False)


def _picture(found: SearchResult, limit_ms: float) -> Picture:
    """Draw every sub-network's error against its latency, the Pareto front, the limit and the answer."""
    from thinwire.tools.pictures import Mark, Panel, Picture, Series

    def series(name: str, candidates: Sequence[Candidate], kind: str) -> Series:
        return Series(name, tuple(c.predicted_ms for c in candidates), tuple(-c.fitness for c in candidates), kind)

    best, error = found.best, -found.best.fitness
    assert best.measured_ms is not None  # the answer of a search
    curves = (
        series("sub-networks, predicted latency", found.archive, "points"),
        series("best at this latency", found.pareto(), "steps"),
        Series("answer, measured", (best.measured_ms,), (error,), "points", (best.measured_ms, error)),
    )
    limit = Mark(limit_ms, f"limit, {limit_ms:g} ms")
    panel = Panel("milliseconds per image pair", "mean error of a pixel's disparity, pixels", curves, (limit,))
    return Picture(f"{len(found.archive)} sub-networks evaluated", (panel,))


def _cost(
    console: Any, net: ElasticStereo, score: Calibrated, limit_ms: float, evolution: Evolution, world: int
) -> None:
    """Say how long it will take, based on the time of the largest network."""
    began = time.perf_counter()
    score(net.space.largest)
    seconds, most = time.perf_counter() - began, evolution.population * (evolution.generations + 1)
    console.print(
        f"limit {limit_ms:g} ms; at most {most} sub-networks to evaluate, {seconds:.2g} s each on {world} rank(s): "
        f"at most {most * seconds / world:.0f} s",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


@app.command(epilog="Example: thinwire supernet export run/calibrated.pt --sub-net run/best.json --out best.pt2")
def export(
    net: Annotated[Path, typer.Argument(help="A network that train or search wrote (search writes calibrated.pt).")],
    out: Annotated[Path, typer.Option(help="A .pt2 file (torch.export), or .onnx if ONNX is installed.")],
    sub_net: Annotated[str, typer.Option(help="best.json from search, or largest, smallest or k,d,e,S.")] = "largest",
    size: Size = "48x96",
    json: Json = False,
) -> None:
    """Write one sub-network to a file that runs without thinwire, and compare the two."""
    from thinwire.systems.supernet.stereo import export as export_net
    from thinwire.systems.supernet.stereo import load_net

    check_output("--out", out)
    made = load_net(net)
    chosen = parse_sub_net(sub_net, made)
    plain = made.extract(chosen).eval()
    shape = parse_size(size)
    with progress(f"writing {out}"):
        difference = export_net(plain, out, shape)
    size_words = sum(p.numel() for p in plain.parameters())
    if json:
        typer.echo(json_module.dumps({"file": str(out), "parameters": size_words, "max_difference_px": difference}))
    else:
        typer.echo(
            f"written: {out}, {size_words:,} parameters; differs by at most {difference:.2g} px from the original"
        )
    if difference > 1e-4 * max(1.0, made.max_disparity):
        raise RunFailed(f"{out} does not compute what the network computes: off by {difference:.2g} px")


MADE_UP = ("dots", "planes", "scenes")
_KINDS = {"dots": "pieces", "planes": "plane", "scenes": "scene"}


def parse_size(text: str) -> tuple[int, int]:
    """Parse ``48x96``: height, then width."""
    found = re.fullmatch(r"(\d+)x(\d+)", text.strip())
    if found is None or "0" in found.groups():
        raise ValueError(f"--size {text}: give height x width, such as 48x96")
    return int(found[1]), int(found[2])


def parse_pairs(data: str, size: tuple[int, int], max_disparity: float, count: int, seed: int) -> Pairs:
    from thinwire.systems.supernet.stereo import RandomDots, StereoFiles

    if data in MADE_UP:
        return RandomDots(count, *size, max_disparity, _KINDS[data], seed)
    if not Path(data).is_file():
        known = ", ".join(MADE_UP)
        raise ValueError(
            f"--data {data!r} is unknown; {meant(data, MADE_UP)}use one of {known}, or a file that lists pairs"
        )
    return StereoFiles(data, size, augment=False, seed=seed)


def parse_method(text: str) -> Method | str:
    """Parse ``active``, ``dense``, or the method for the active part: ``topk:density=0.01``."""
    from thinwire import method
    from thinwire.tools.bench.words import split_options

    name, options = split_options(text)
    return name if name in ("active", "dense") and not options else method(name, **options)


def make_net(config: str, deformable: int | None, elastic_refinement: bool) -> ElasticStereo:
    from dataclasses import replace

    from thinwire.systems.supernet import Space
    from thinwire.systems.supernet.stereo import ElasticStereo

    if config == "tiny":
        if elastic_refinement:
            raise ValueError("--elastic-refinement is for --config published")
        return ElasticStereo.tiny() if deformable is None else ElasticStereo.tiny(deformable)
    if config != "published":
        raise ValueError(f"--config {config!r} must be tiny or published")
    space = Space()
    if elastic_refinement:
        space = replace(space, refine_widths=(16, 32), refine_depths=(2, 4, 6))
    return ElasticStereo(space, deformable=3 if deformable is None else deformable)


def make_phases(net: ElasticStereo, config: str, steps: str, epoch: int | None, sub_nets: int) -> tuple[Phase, ...]:
    """Return the published phases, for epochs of this many steps; or two short ones."""
    from thinwire.systems.supernet.stereo import published, short

    if epoch is not None:
        if config != "published" or net.space.refine_widths:
            raise ValueError("--epoch is for --config published without --elastic-refinement; else give --steps")
        return published(epoch)
    found = re.fullmatch(r"(\d+),(\d+)", steps.strip())
    if found is None:
        raise ValueError(f"--steps {steps}: give the steps of the large and of the shrinking phase, such as 300,300")
    return short(net.space, int(found[1]), int(found[2]), sub_nets)


def parse_sub_net(text: str, net: ElasticStereo) -> SubNet:
    """``largest``, ``smallest``, a file that search wrote, or four numbers k,d,e,S for all blocks."""
    import json

    from thinwire.systems.supernet import SubNet

    if text in ("largest", "smallest"):
        return net.space.largest if text == "largest" else net.space.smallest
    if found := re.fullmatch(r"(\d+),(\d+),(\d+),(\d+)", text):
        kernel, depth, expand, scales = map(int, found.groups())
        return net.space.uniform(kernel, depth, expand, scales)
    if not Path(text).is_file():
        raise ValueError(
            f"--sub-net {text} is neither largest, smallest, k,d,e,S nor a file from thinwire supernet search"
        )
    content = Path(text).read_text()
    try:
        data = json.loads(content)
        content = json.dumps(data["sub_net"]) if "sub_net" in data else content
    except (TypeError, ValueError, RecursionError):
        pass  # from_json reports what is wrong
    made = SubNet.from_json(content)
    net.space.check(made)
    return made


def corners(net: ElasticStereo) -> dict[str, Any]:
    space = net.space
    small = space.smallest
    middle = space.uniform(space.kernels[-1], space.depths[0], space.expands[-1], space.scales[0])
    return {"largest": space.largest, "shallow": middle, "smallest": small}
