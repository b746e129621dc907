"""``thinwire supernet``: train a stereo network of many sizes, and cut it to a latency."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.checks import meant
from thinwire.tools.cli.console import (
    Output,
    RunFailed,
    check_path,
    note,
    plain_table,
    progress,
    read_record,
    torchrun_group,
    watched_load,
)
from thinwire.tools.cli.options import JsonOption, ThreadsOption
from thinwire.tools.cli.verb import Verb, argument, option

if TYPE_CHECKING:
    from thinwire.core.program import Method
    from thinwire.systems.supernet import Evolution, SubNet
    from thinwire.systems.supernet.search import Candidate, SearchResult
    from thinwire.systems.supernet.stereo import ElasticStereo, LatencyTable, Pairs, Phase
    from thinwire.systems.supernet.stereo.evaluation import Calibrated
    from thinwire.tools.pictures import Picture


_CALIBRATION, _BATCH = 80, 20


MADE_UP = {"dots": "pieces", "planes": "plane", "scenes": "scene"}


class SizeOption(JsonOption):
    size: str = option("48x96", "Height x width of the images, or of the crops if pairs are files.")

    @property
    def shape(self) -> tuple[int, int]:
        found = re.fullmatch(r"(\d+)x(\d+)", self.size.strip())
        if found is None or "0" in found.groups():
            raise ValueError(f"--size {self.size}: give height x width, such as 48x96")
        return int(found[1]), int(found[2])


class NetOptions(Verb):
    """Which network, untrained."""

    config: str = option("tiny", "tiny or published.", choices=("tiny", "published"))
    elastic_refinement: bool = option(False, "Extension: the refinement can be cut too.")

    def make(self, deformable: int | None = None) -> ElasticStereo:
        from thinwire.systems.supernet import Space
        from thinwire.systems.supernet.stereo import ElasticStereo

        if self.config == "tiny":
            if self.elastic_refinement:
                raise ValueError("--elastic-refinement is for --config published")
            return ElasticStereo.tiny() if deformable is None else ElasticStereo.tiny(deformable)
        space = Space()
        if self.elastic_refinement:
            space = replace(space, refine_widths=(16, 32), refine_depths=(2, 4, 6))
        return ElasticStereo(space, deformable=3 if deformable is None else deformable)


class PairsOptions(SizeOption, ThreadsOption):
    """Pairs of images to train on, and to measure the error on."""

    data: str = option("dots", "dots, planes, scenes (synthetic), or a file with lines: left right disparity.")
    held_out: str = option("", "Pairs to measure the error on; by default more synthetic pairs.")
    max_disparity: float = option(15.0, "Largest disparity of synthetic pairs, in pixels.")
    seed: int = option(0, "Seed of all random draws.")

    def pairs(self, training: int) -> tuple[Pairs, Pairs]:
        """Return so many pairs to train on, and 32 others."""
        return self._read(self.data, training, self.seed), self._read(self.held_out or self.data, 32, self.seed + 1)

    def _read(self, data: str, count: int, seed: int) -> Pairs:
        from thinwire.systems.supernet.stereo import RandomDots, StereoFiles

        if data in MADE_UP:
            return RandomDots(count, *self.shape, self.max_disparity, MADE_UP[data], seed)
        if not Path(data).is_file():
            known = f"use one of {', '.join(MADE_UP)}, or a file that lists pairs"
            raise ValueError(f"--data {data!r} is unknown; {meant(data, MADE_UP)}{known}")
        return StereoFiles(data, self.shape, seed=seed)


def _score(net: ElasticStereo, training: Pairs, testing: Pairs) -> Calibrated:
    from thinwire.systems.supernet.stereo import batches
    from thinwire.systems.supernet.stereo.evaluation import Calibrated

    first = [training[i] for i in range(min(_CALIBRATION, len(training)))]
    return Calibrated(net, list(batches(first, _BATCH)), list(batches(testing, 8)))


class SupernetTrainVerb(NetOptions, PairsOptions):
    """Train all sub-networks, on the ranks of torchrun or of ``thinwire lab run``, or in one process.

    Example: thinwire supernet train --out run --data dots
    """

    out: Path = option(..., "Folder for the network and its checkpoints; run again to continue.", writes="folder")
    deformable: int | None = option(None, "Modules with deformable convolutions.")
    steps: str = option("300,300", "Steps of the large and of the shrinking phase.")
    epoch: int | None = option(None, "Run the published phases instead, with epochs of this many steps.")
    sub_nets: int = option(2, "Sub-networks per step of the shrinking phase.")
    batch_size: int = option(4, "Pairs per rank and step.")
    method: str = option("active", "active, dense, or a method for the active part: cast, topk:density=0.01.")
    sampling: str = option("shared", "shared (all ranks run the same sub-networks) or per-rank.")
    divisor: str = option("world", "world, or participants with per-rank sampling.")
    semantics: str = option("skip", "Unused weights: skip leaves them, zero lets Adam move them.")
    checkpoint_every: int = option(50, "Steps between checkpoints.")

    def run(self, output: Output) -> Any:
        import torch

        from thinwire.systems.supernet.stereo import batches, save_net, shrink
        from thinwire.systems.supernet.stereo.evaluation import constant_guess
        from thinwire.systems.supernet.stereo.training import total

        training, testing = self.pairs(4096)
        torch.set_num_threads(self.threads)
        torch.manual_seed(self.seed)
        net = self.make(self.deformable)
        if self.max_disparity >= net.max_disparity and self.data in MADE_UP:
            limit = f"must be below {net.max_disparity}, the most that {self.config} can see"
            raise ValueError(f"--max-disparity {self.max_disparity:g} {limit}")
        phases, chosen = self.phases(net), parse_method(self.method)
        with torchrun_group() as (rank, _), progress("training", total(phases), quiet=rank > 0) as bar:
            before = {phase.name: sum(p.steps for p in phases[:i]) for i, phase in enumerate(phases)}

            def on_step(phase: Any, step: int, report: Any) -> None:
                if not bar.completed and before[phase.name] + step:
                    bar.log(f"continuing from step {before[phase.name] + step}")
                words = f"{phase.name}, loss {report.loss:.3f}, {report.share:.0%} active"
                bar(completed=before[phase.name] + step + 1, description=words)

            try:
                report = shrink(
                    net, training, phases, batch=self.batch_size, method=chosen, on_step=on_step,
                    checkpoint_dir=self.out / "checkpoints",
                    **self.part(["sampling", "divisor", "semantics", "seed", "checkpoint_every"]),
                )  # fmt: skip
            except (RuntimeError, OSError) as error:
                raise RunFailed(str(error)) from error
        if rank:
            return None
        score, guess = _score(net, training, testing), constant_guess(list(batches(testing, 8)), net.max_disparity)
        with progress("evaluating"):
            found = {name: score.metrics(sub_net) for name, sub_net in corners(net).items()}
        save_net(net, self.out / "net.pt")
        result = {
            "net": str(self.out / "net.pt"),
            **report.to_dict(),
            "constant_guess_epe": guess,
            "corners": {name: {"epe": m.epe, "bad3": m.bad3, "d1": m.d1} for name, m in found.items()},
        }
        output.keep(self.out, "report", result)
        if not any(phase.done for phase in report.phases):
            output.say(f"all {total(phases)} steps had been done before; the network is evaluated again")
        sizes = {name: sum(p.numel() for p in net.extract(one).parameters()) for name, one in corners(net).items()}
        rows = [(name, f"{sizes[name]:,}", f"{one.epe:.2f} px", f"{one.bad3:.1%}") for name, one in found.items()]
        columns = ("sub-network", "parameters", "end-point error", "> 3 px")
        output.say(plain_table("held-out pairs", columns, [*rows, ("constant guess", "", f"{guess:.2f} px", "")]))
        for phase in report.phases:
            if phase.bytes_sent:
                output.say(
                    f"{phase.name}: {phase.bytes_sent / 1e6:.2f} MB sent per rank, the whole gradient would be "
                    f"{phase.dense_bytes / 1e6:.2f} MB; {phase.mean_share:.0%} of the gradient active"
                )
        output.wrote(self.out / "net.pt", note=f"; next: thinwire supernet search {self.out / 'net.pt'}")
        return result

    def phases(self, net: ElasticStereo) -> tuple[Phase, ...]:
        """Return the published phases, for epochs of this many steps; or two short ones."""
        from thinwire.systems.supernet.stereo import published, short

        if self.epoch is not None:
            if self.config != "published" or net.space.refine_widths:
                raise ValueError("--epoch is for --config published without --elastic-refinement; else give --steps")
            return published(self.epoch)
        found = re.fullmatch(r"(\d+),(\d+)", self.steps.strip())
        if found is None:
            raise ValueError(
                f"--steps {self.steps}: give the steps of the large and of the shrinking phase, such as 300,300"
            )
        return short(net.space, int(found[1]), int(found[2]), self.sub_nets)


class SupernetTableVerb(NetOptions, SizeOption, ThreadsOption):
    """Measure the latency of every part on this device; the smallest and the largest network first.

    Example: thinwire supernet table run/net.pt
    """

    net: Path | None = argument(None, "A network that train wrote; by default an untrained one of --config.")
    config: str = "published"
    size: str = "96x192"
    repeats: int = option(10, "Timed calls of each part.")
    out: Path | None = option(None, "File for the table, for search.", writes="file")

    def run(self, output: Output) -> Any:
        import torch

        from thinwire.systems.supernet.stereo import load_net

        torch.set_num_threads(self.threads)
        made = self.make() if self.net is None else load_net(self.net)
        with watched_load(self.threads) as load:
            found = _measure(made, self.shape, self.repeats)
        data = load.with_load(found)
        _range(output, made, found)
        lines = {f"volumes and aggregation, {scales} scales": one for scales, one in found.aggregation.items()}
        lines |= {f"refinement, {cut}": one for cut, one in found.refinement.items()}
        for key, one in found.blocks.items():
            stage, place, kernel, expand = key.split(".")
            which = "first" if place == "0" else "later"
            lines[f"stage {stage}, {which} block, kernel {kernel}, expansion {expand}"] = one
        title = f"milliseconds on {found.device}, {found.threads} thread(s), one pair of {self.size}"
        cells = ((part, f"{one.p50:.2f}", f"{one.p90:.2f}") for part, one in lines.items())
        output.say(plain_table(title, ("part", "median", "p90"), cells))
        if self.out is not None:
            output.write(self.out, json.dumps(data))
        return data


def _measure(net: ElasticStereo, shape: tuple[int, int], repeats: int) -> LatencyTable:
    from thinwire.systems.supernet.stereo import build_table

    with progress("measuring parts") as bar:
        return build_table(net, shape, repeats, on_part=bar)


def _range(output: Output, net: ElasticStereo, found: LatencyTable) -> None:
    low, high = (found.predict(n) for n in (net.space.smallest, net.space.largest))
    output.say(
        f"smallest network {low:.2f} ms, largest {high:.2f} ms: {high / low:.2f} times as long "
        f"(parts summed, times {found.factor:.2f}; off by up to {found.error:.0%} on 8 whole networks)"
    )


class SupernetSearchVerb(PairsOptions):
    """Find the best sub-network within a limit of measured latency; the ranks of torchrun share the evaluations.

    Example: thinwire supernet search run/net.pt
    """

    net: Path = argument(..., "A network that train wrote.")
    limit_ms: float | None = option(None, "Latency of one pair; by default half-way from smallest to largest.", above=0)
    population: int = option(32, "Sub-networks per generation.")
    generations: int = option(8, "Generations after the first.")
    repeats: int = option(10, "Timed calls of each part and each finalist.")
    table: Path | None = option(None, "A file from thinwire supernet table.")
    out: Path | None = option(None, "Folder for the results; by default next to the network.", writes="folder")

    def run(self, output: Output) -> Any:
        import torch

        from thinwire.engine.attach import attach
        from thinwire.systems.supernet import Evolution
        from thinwire.systems.supernet.search import search
        from thinwire.systems.supernet.stereo import LatencyTable, load_net, measure_net, save_net

        torch.set_num_threads(self.threads)
        evolution = Evolution(self.population, self.generations, seed=self.seed)
        shape, made = self.shape, load_net(self.net)
        folder, limit = self.out or self.net.absolute().parent, self.limit_ms
        check_path("--out", folder, "folder")
        score = _score(made, *self.pairs(_CALIBRATION))
        own = self.threads * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        with torchrun_group() as (rank, world), watched_load(own, quiet=rank > 0) as load:
            sync = attach(made, torch.optim.SGD(made.parameters(), lr=0.0))
            if self.table is not None:
                timings = read_record(self.table, LatencyTable)
                if timings.size != shape:
                    there = "x".join(map(str, timings.size))
                    raise ValueError(f"{self.table} is for images of {there}, not {self.size}")
            else:
                timings = _measure(made, shape, self.repeats)
            # rank 0's: the limit must exclude the same sub-networks everywhere
            timings = LatencyTable.from_json(sync.services.gather(timings.to_json().encode())[0].decode())
            if limit is None:
                limit = round((timings.predict(made.space.smallest) + timings.predict(made.space.largest)) / 2, 2)
            if rank == 0:
                _cost(made, score, limit, evolution, world)
            with progress("searching", self.generations + 1, quiet=rank > 0) as bar:

                def on_generation(number: int, best: Any) -> None:
                    words = f"best {-best.fitness:.3f} px, {best.predicted_ms:.1f} ms"
                    bar(completed=number + 1, description=words)

                measure = lambda n: measure_net(made, n, shape, self.repeats).p50  # noqa: E731
                found = sync.services.run(
                    search(
                        made.space, score, limit, timings.predict, measure, evolution, rank=rank, world=world,
                        canonical=made.canonical, on_generation=on_generation,
                    )
                )  # fmt: skip
            sync.close()
        if rank:
            return None
        best = found.best
        metrics = score.metrics(best.sub_net)  # leaves the statistics of this sub-network in the file
        save_net(made, folder / "calibrated.pt")
        picture = _picture(found, limit)
        result = load.with_load({
            "sub_net": best.sub_net,
            "epe": metrics.epe, "bad3": metrics.bad3, "limit_ms": limit, "measured_ms": best.measured_ms,
            "predicted_ms": best.predicted_ms, "table_error": timings.error, "evaluated": len(found.archive),
            "parameters": sum(p.numel() for p in made.extract(best.sub_net).parameters()),
            "picture": picture, "pareto": [{"ms": c.predicted_ms, "epe": -c.fitness} for c in found.pareto()],
        })  # fmt: skip
        written = [*output.keep(folder, "best", result), *output.draw(picture, folder / "pareto.png")]
        _range(output, made, timings)
        output.say(
            f"answer: {best.sub_net}\n{result['parameters']:,} parameters, end-point error {metrics.epe:.3f} px; "
            f"measured {best.measured_ms:.2f} ms (predicted {best.predicted_ms:.2f}), limit {limit:g} ms; "
            f"{len(found.archive)} of {made.space.count():,} sub-networks evaluated"
        )
        output.wrote(*written, folder / "calibrated.pt")
        return result


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


def _cost(net: ElasticStereo, score: Calibrated, limit_ms: float, evolution: Evolution, world: int) -> None:
    """Say how long it will take, based on the time of the largest network."""
    began = time.perf_counter()
    score(net.space.largest)
    seconds, most = time.perf_counter() - began, evolution.population * (evolution.generations + 1)
    note(
        f"limit {limit_ms:g} ms; at most {most} sub-networks to evaluate, {seconds:.2g} s each on {world} rank(s): "
        f"at most {most * seconds / world:.0f} s"
    )


class SupernetExportVerb(SizeOption):
    """Write one sub-network to a file that runs without thinwire, and compare the two.

    Example: thinwire supernet export run/calibrated.pt --sub-net run/best.json --out best.pt2
    """

    net: Path = argument(..., "A network that train or search wrote (search writes calibrated.pt).")
    out: Path = option(..., "A .pt2 file (torch.export), or .onnx if ONNX is installed.", writes="file")
    sub_net: str = option("largest", "best.json from search, or largest, smallest or k,d,e,S.")

    def run(self, output: Output) -> Any:
        from thinwire.systems.supernet.stereo import export, load_net

        made = load_net(self.net)
        alone, shape = made.extract(self.chosen(made)).eval(), self.shape
        with progress(f"writing {self.out}"):
            difference = export(alone, self.out, shape)
        count = sum(p.numel() for p in alone.parameters())
        differs = f"differs by at most {difference:.2g} px from the original"
        output.wrote(self.out, note=f", {count:,} parameters; {differs}")
        if difference > 1e-4 * max(1.0, made.max_disparity):
            output.failure = f"{self.out} does not compute what the network computes: off by {difference:.2g} px"
        return {"file": str(self.out), "parameters": count, "max_difference_px": difference}

    def chosen(self, net: ElasticStereo) -> SubNet:
        from thinwire.systems.supernet import SubNet

        text = self.sub_net
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


def parse_method(text: str) -> Method | str:
    """Parse ``active``, ``dense``, or the method for the active part: ``topk:density=0.01``."""
    from thinwire import method
    from thinwire.tools.bench.words import split_options

    name, options = split_options(text)
    return name if name in ("active", "dense") and not options else method(name, **options)


def corners(net: ElasticStereo) -> dict[str, Any]:
    space = net.space
    small = space.smallest
    middle = space.uniform(space.kernels[-1], space.depths[0], space.expands[-1], space.scales[0])
    return {"largest": space.largest, "shallow": middle, "smallest": small}


VERBS = (SupernetTrainVerb, SupernetTableVerb, SupernetSearchVerb, SupernetExportVerb)
