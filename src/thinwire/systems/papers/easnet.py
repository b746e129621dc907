"""EASNet: sub-networks cut out of one trained network, against the same ones trained alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

import torch
from torch.utils.flop_counter import FlopCounterMode

from thinwire.systems.papers.paper import Paper, Shown, Word
from thinwire.systems.papers.workbench import Workbench
from thinwire.systems.supernet import Space, SubNet, stereo
from thinwire.systems.supernet.stereo.data import StereoBatch, middlebury_motorcycle, normalise
from thinwire.systems.supernet.stereo.evaluation import Calibrated, box_match

SPACE = Space((3, 5), (1, 2), (2, 4), (1, 2, 3), refine_widths=(4, 8, 16), refine_depths=(1, 2, 3))
"""The refinement is elastic too: as published it does most of the work, whatever is cut. All sizes train from the first
step on: after steps of the largest alone (the paper's phases) so short a training leaves them at 1.07 to 1.27 of the
error."""
SIZES = {"smallest": SPACE.smallest, "middle": SPACE.uniform(5, 1, 2, 2, (8, 2)), "largest": SPACE.largest}
MOST = 24  # pixels of disparity


def simulated() -> Iterator[Shown]:
    """How much a cut can save at the paper's scale: multiplications. Its 100 ms are of a GPU, its pairs elsewhere."""
    elastic = Space(refine_widths=(8, 16, 32), refine_depths=(1, 3, 6))
    for key, space in (("as published", Space()), ("elastic refinement", elastic)):
        with torch.device("meta"):
            net, view, work = stereo.ElasticStereo(space, deformable=0), torch.empty(1, 3, 576, 960), []
            for sub_net in (space.largest, space.smallest):
                with FlopCounterMode(display=False) as counter:
                    net.extract(sub_net)(view, view)
                work.append(counter.get_total_flops())
        what = f"multiplications, largest over smallest sub-network, 576x960, {key}"
        yield Shown(key, what, work[0] / work[1])


def only(sub_net: SubNet) -> Space:
    """Return the space of one uniform sub-network alone."""
    (kernel, expand), (width, depth) = sub_net.stages[0][0], sub_net.refine or (0, 0)
    return Space((kernel,), (len(sub_net.stages[0]),), (expand,), (sub_net.scales,), (width,), (depth,))


def trained(bench: Workbench, space: Space, seed: int, phase: stereo.Phase) -> stereo.ElasticStereo:
    """Train a network of a space: of many sub-networks, or of one."""
    scales, width, depth = space.scales[-1], space.refine_widths[-1], space.refine_depths[-1]
    torch.manual_seed(seed)
    net = stereo.ElasticStereo(space, (8, 16, 32)[:scales], 2 * MOST, 2, 0, width, (1, 2, 4)[:depth])
    told = bench.tell
    stereo.shrink(
        net, scenes(4096, seed), [phase], seed=seed, on_step=lambda p, step, _: told(f"{p.name}: step {step}")
    )
    return net


def scenes(count: int, seed: int) -> stereo.RandomDots:
    return stereo.RandomDots(count, 48, 96, MOST, "scene", seed=seed)


def measured(bench: Workbench) -> Iterator[Shown]:
    """Held-out errors of three sizes, cut out of one network and trained alone for as many steps; and their times."""
    steps, seeds = (600, range(3)) if bench.full else (240, range(1))
    flat = steps * 3 // 4
    left, right, truth = middlebury_motorcycle(3)
    views = [stereo.pad(normalise(x), 12)[None] for x in (left, right)]
    real = [StereoBatch(views[0], views[1], stereo.pad(truth, 12, torch.inf)[None])]
    held_out, errors = list(stereo.batches(scenes(32, 99), 8)), dict[str, list[float]]()
    for seed in seeds:
        some = [next(stereo.batches(scenes(80, seed), 80))]
        whole = trained(bench, SPACE, seed, stereo.Phase("all sizes", SPACE, steps, 2e-3, sub_nets=4, flat=flat))
        for name, sub_net in SIZES.items():
            own = only(sub_net)
            alone = trained(bench, own, seed, stereo.Phase(f"{name} alone", own, steps, 2e-3, flat=flat))
            runs = {name: (whole, sub_net, held_out), f"{name} alone": (alone, own.largest, held_out)}
            for key, (net, one, known) in (runs | {f"{name} real": (whole, sub_net, real)}).items():
                errors.setdefault(key, []).append(-Calibrated(net, some, known)(one))
    timed = [{k: stereo.measure_net(whole, one, (240, 384), 5).p50 for k, one in SIZES.items()} for _ in range(5)]
    times = {name: min(turn[name] for turn in timed) for name in SIZES}  # other work on this machine only adds
    for name in SIZES:
        cut, alone_too = fmean(errors[name]), fmean(errors[f"{name} alone"])
        yield Shown(f"{name} time", f"{name}: time over the largest's, 240x384", times[name] / times["largest"])
        yield Shown(name, f"{name}: error on held-out scenes, cut out; {steps} steps of 4 sizes each", cut, "px")
        yield Shown(
            f"{name} ratio", f"{name}: that error over the one trained alone for {steps} steps", cut / alone_too
        )
        yield Shown(
            f"{name} real", f"{name}: error on a real pair, the motorcycle", fmean(errors[f"{name} real"]), "px"
        )
    matched = stereo.measure(box_match(left, right, MOST + 1)[None], truth[None], 2 * MOST).epe
    yield Shown("block matching", "block matching 9x9 on that pair", matched, "px")


def judge(found: Mapping[str, float]) -> tuple[Word, str]:
    fast = [name for name in ("smallest", "middle") if found[f"{name} time"] <= 0.5]
    kept = [name for name in fast if found[f"{name} ratio"] <= 1.03]
    each = [
        f"the {n} network has {found[f'{n} ratio']:.2f} times the error of the same trained alone, in "
        f"{found[f'{n} time']:.2f} of the largest's time"
        for n in fast
    ]
    said = ", ".join(each) or "no sub-network takes half the largest one's time here"
    if real := [name for name in fast if found[f"{name} real"] > found["block matching"]]:
        said += f". On a real pair block matching is better than the {' and the '.join(real)}"
    if not kept:
        return "does not hold:", said
    if kept == fast and found["as published"] >= 2:
        return "holds", said
    return (
        "holds where",
        f"the refinement is elastic too (as published, a cut saves {found['as published']:.2f} x); {said}",
    )


PAPER = Paper(
    system="EASNet",
    title="EASNet: Searching Elastic and Accurate Network Architecture for Stereo Matching",
    authors="Q. Wang, S. Shi, K. Zhao, X. Chu (ECCV 2022)",
    link="https://arxiv.org/abs/2207.09796",
    claim="a sub-network for a latency keeps its accuracy without additional training; 0.73 px at 100 ms",
    setting="Scene Flow, 192 disparities, 8 GPUs",
    page="supernet.md",
    needs={"stereo": ("skimage", "PIL")},
    main={
        "as published": "multiplications that a cut saves, as published",
        "elastic refinement": "the same, refinement elastic too",
        "smallest time": "smallest network: time beside the largest's",
        "smallest ratio": "smallest: error beside the one trained alone; less is better",
        "smallest real": "smallest: error on a real pair",
        "block matching": "block matching on that pair",
    },
)
