"""InHAD: iteration numbers instead of gradients, sums per node, bounded staleness."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.core.events import python
from thinwire.systems.papers.paper import Paper, Shown, Word, curves
from thinwire.systems.papers.workbench import Workbench
from thinwire.systems.parameter_server import Layout, Link, preset, simulate
from thinwire.systems.parameter_server.synchronous import hierarchical_seconds, synchronous_step_seconds
from thinwire.tools.bench.models.digits import HELD_OUT, images
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.cli.console import RunFailed
from thinwire.tools.pictures import Picture

Run = list[tuple[float, float, float]]
"""Virtual seconds, held-out loss, accuracy."""
SLOW = (1.0, 1.0, 1.5, 4.0)
"""How many times slower each of four nodes of two workers is."""
INHAD = "inhad:max_staleness=8:update_every=nodes/2"
SCHEMES = (INHAD, "asp", "ssp", "bsp")
CASES = (("100mbit", 1e8, 4, (*SCHEMES, "all-reduce")), ("6mbit", 6e6, 4, SCHEMES[:2]),
         ("100mbit", 1e8, 32, (*SCHEMES[:2], "all-reduce")))  # fmt: skip
"""Link, digits a gradient, and what is compared; the CNN has 73 KB, so that the second link holds ASP back."""
RATES = (0.001, 0.0025, 0.006)
REAL_SECONDS = 40
LOSSES = (0.9, 0.7)
"""Held out, from 2.3; with smoothed labels the least is 0.5."""


def simulated() -> Iterator[Shown]:
    """ResNet-50 (102 MB) on 16 x 4 GPUs that step in 0.3 s, one node four times slower."""
    for name, bits in (("1 Gb/s", 1e9), ("10 Gb/s", 1e10)):
        link, rates = Link(5e-4, bits), dict[str, float]()
        for text in SCHEMES:
            trace = simulate(
                replace(preset(text), start_nodes=16), nodes=16, workers=4, seconds=60.0, payload_bytes=102_228_128,
                step_seconds=lambda node, *_: 1.2 if node == 0 else 0.3, link=link, server_link=link,
            )  # fmt: skip
            rates[text] = trace.gradients / trace.seconds
        rates["all-reduce"] = 64 / (1.2 + max(0.0, hierarchical_seconds(102_228_128, 16, bits, 5e-4) - 0.8))
        for text in ("asp", "ssp", "bsp", "all-reduce"):
            what = f"ResNet-50, 16 x 4 GPUs, one node 4 times slower, {name}: gradients a second, InHAD over {text}"
            yield Shown(f"{text} {name}", what, rates[INHAD] / max(rates[text], 1e-9))


def measured(bench: Workbench) -> Iterator[Shown | Picture]:
    """Real gradients in virtual time: every scheme at the best of three rates of Adam without momentum.

    Two of them also as processes of the lab, at these rates.
    """
    rates = dict[str, float]()
    for link, bits, batch, schemes in CASES:
        lines, where = {}, f"{link} {batch}"
        for text in schemes:
            runs = dict[float, list[Run]]()
            for rate in RATES:
                bench.tell(f"{link}, batch {batch}, {text}, rate {rate}")
                runs[rate] = [served(text, rate, bits, batch, seed) for seed in range(3 if bench.full else 1)]
            taken = min(RATES, key=lambda rate: tuple(reached(runs[rate], loss) for loss in LOSSES[::-1]))
            best = runs[taken]
            rates.setdefault(text, taken)
            what = f"{text}, digits, batch {batch}, 4 x 2 workers of different speed, {link}"
            for loss in LOSSES:
                yield Shown(f"{text} {where} {loss}", f"{what}: to {loss}", reached(best, loss), "s")
            accuracy = 100 * statistics.fmean(run[-1][2] for run in best)
            yield Shown(f"{text} {where} accuracy", f"{what}: accuracy after 60 s", accuracy, "%")
            lines[text.partition(":")[0]] = [(at, loss) for at, loss, _ in best[0]]
        title = f"digits, batch {batch}, 4 x 2 workers of different speed, {link}"
        yield curves(title, "virtual seconds", "held-out loss", lines)
    for text in SCHEMES[:2]:
        bench.tell(f"{text} in the lab: a server and 4 nodes of 2 workers, {REAL_SECONDS} s")
        found = in_the_lab(text, rates[text])
        what = f"{text}, digits, batch 4, a server and 4 x 2 workers as processes, 100mbit"
        yield Shown(f"{text} lab", f"{what}: to {LOSSES[0]}", found[0], "s")
        yield Shown(f"{text} lab gradients", f"{what}: gradients a second", found[1], "")


def in_the_lab(text: str, rate: float) -> tuple[float, float]:
    """Return seconds until the first of the losses, twice the run's if it is not reached, and gradients a second."""
    slow = [word for node, factor in enumerate(SLOW) if factor > 1 for word in ("--slow", f"{node}:{factor}")]
    ended = subprocess.run(
        [*python("-m", "thinwire", "ps", "run", "--model", "digits:width=8:hidden=64:batch=4", "--settings", text),
         "--outer", f"adam:lr={rate}:beta1=0", "--nodes", str(len(SLOW)), "--workers", "2", "--pace", "0.1", *slow,
         "--link", "100mbit", "--seconds", str(REAL_SECONDS), "--evaluate-every", "20", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        raise RunFailed(f"thinwire ps run has failed: {(ended.stderr.splitlines() or ['without a word'])[-1]}")
    told = json.loads(ended.stdout)
    when = next((at for at, _, loss in told["losses"] if loss <= LOSSES[0]), 2.0 * REAL_SECONDS)
    return when, told["status"]["gradients"] / told["status"]["training_seconds"]


def served(
    text: str, rate: float, bits: float, batch: int, seed: int, seconds: float = 60.0,
    pace: float = 0.1,
) -> Run:  # fmt: skip
    """Return (virtual seconds, held-out loss, accuracy); an all-reduce is BSP on steps that contain the exchange."""
    torch.set_num_threads(1)
    work, link, (pixels, labels) = (
        build_model(f"digits:width=8:hidden=64:batch={batch}", seed),
        Link(5e-4, bits),
        images(),
    )
    net, layout = work.model, Layout.of(work.model)
    takes = [pace * factor for factor in SLOW]
    if text == "all-reduce":
        exchange = hierarchical_seconds(4 * layout.numel, len(SLOW), bits, 5e-4)
        takes = [synchronous_step_seconds(lambda node, *_: pace * SLOW[node], 4, 2, exchange)] * 4
        text, link = "bsp", Link(0.0)
    right: list[float] = []

    def gradient(theta: Tensor, node: int, worker: int, step: int) -> Tensor:
        layout.write(theta, net)
        net.zero_grad()
        work.loss(net, step, 64 * (node + 16 * seed) + worker).backward()
        return layout.gradient(net)

    def held_out(theta: Tensor) -> float:
        layout.write(theta, net)
        with torch.no_grad():
            right.append(float((net(pixels[-HELD_OUT:]).argmax(1) == labels[-HELD_OUT:]).float().mean()))
        return work.held_out_loss() or 0.0

    trace = simulate(
        replace(preset(text), start_nodes=4), nodes=4, workers=2, seconds=seconds, link=link, server_link=link,
        outer=lambda p: torch.optim.Adam(p, rate, (0.0, 0.999)), step_seconds=lambda node, *_: takes[node],
        parameters=layout.flat(net), gradient=gradient, evaluate=held_out,
    )  # fmt: skip
    return [(at, loss, share) for (at, loss), share in zip(trace.losses, right)]


def reached(runs: list[Run], goal: float) -> float:
    """Return the mean seconds until ``goal``; 120 for a run that does not get there in its 60."""
    return statistics.fmean(next((at for at, loss, _ in run if loss <= goal), 120.0) for run in runs)


def judge(found: Mapping[str, float]) -> tuple[Word, str]:
    small, full, large = (
        found[f"asp {where}"] / found[f"{INHAD} {where}"]
        for where in ("100mbit 4 0.7", "6mbit 4 0.9", "100mbit 32 0.7")
    )
    lost = found["all-reduce 100mbit 4 accuracy"] - found[f"{INHAD} 100mbit 4 accuracy"]
    real = found[f"{SCHEMES[1]} lab"] / found[f"{INHAD} lab"]
    figures = (
        f"it reaches the loss {small:.2f} times as fast as ASP with a batch of 4 ({real:.2f} times as real "
        f"processes), {large:.2f} times with 32, and {full:.2f} times where the server's link is full. After "
        f"equal time its accuracy is {abs(lost):.1f} points {'below' if lost > 0 else 'above'} an all-reduce's. It "
        f"handles {found['asp 10 Gb/s']:.1f} times ASP's gradients at 16 x 4 GPUs"
    )
    if small <= 1 or lost > 1:
        return (
            "does not hold:",
            f"an update of many gradients gains little more than one of a single fresh one; {figures}",
        )
    return (
        ("holds", figures) if large > 1 else ("holds where", f"batches are small, so that noise costs most: {figures}")
    )


PAPER = Paper(
    system="InHAD",
    title="Iteration number-based hierarchical gradient aggregation for distributed deep learning",
    authors="J. Supercomputing 2021, of which only the abstract is public",
    link="https://doi.org/10.1007/s11227-021-04083-x",
    claim="more acceleration than ASP, at nearly the accuracy of Horovod's all-reduce",
    setting="several GPUs a node, nodes of different speed",
    page="parameter_server.md",
    needs={"digits": ("sklearn",)},
    main={
        "asp 10 Gb/s": "gradients a second, times those of ASP, 16 x 4 GPUs, 10 Gb/s",
        "all-reduce 10 Gb/s": "the same, times those of all-reduce",
        "inhad:max_staleness=8:update_every=nodes/2 100mbit 4 0.7": "to a loss of 0.7, digits, batch 4: InHAD",
        "asp 100mbit 4 0.7": "the same: ASP",
        "all-reduce 100mbit 4 0.7": "the same: all-reduce",
        "inhad:max_staleness=8:update_every=nodes/2 100mbit 4 accuracy": "accuracy after 60 s: InHAD",
        "asp 100mbit 4 accuracy": "the same: ASP",
        "all-reduce 100mbit 4 accuracy": "the same: all-reduce",
        "inhad:max_staleness=8:update_every=nodes/2 100mbit 32 0.7": "to a loss of 0.7, batch 32: InHAD",
        "asp 100mbit 32 0.7": "the same: ASP",
    },
)
