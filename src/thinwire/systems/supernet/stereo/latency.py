"""How long each part of a sub-network takes on this device, to predict every sub-network without running it.

Differences from the published code, which times one uniform network: parts are measured, as for Once-for-all, and the
sum is corrected by one factor, found on whole networks; its error is part of the table.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thinwire.core.checks import check_count
from thinwire.core.records import Record
from thinwire.predict.measure.kernels import settle
from thinwire.systems.supernet.space import SubNet
from thinwire.systems.supernet.stereo.layers import correlation, soft_argmax
from thinwire.systems.supernet.stereo.network import ElasticStereo, check_size

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a call: median and 90th percentile."""

    p50: float
    p90: float


@dataclass(frozen=True)
class LatencyTable(Record):
    """Milliseconds of all parts on one device for one image size, one pair at a time.

    Attributes:
        device, size, dtype, threads, torch, repeats: what was measured, and how often.
        blocks: time for both views, by "stage.place.kernel.expand"; place 0 is a stage's first block, 1 any other.
        aggregation: volumes, aggregation and disparity, by number of scales.
        refinement: by "width.depth", or "whole".
        factor: by which sums are multiplied. error: largest relative error of a whole network after that.
        load: of the machine meanwhile, which the command adds.
    """

    called: ClassVar[str] = "a latency table of thinwire supernet"

    device: str
    size: tuple[int, int]
    dtype: str
    threads: int
    torch: str
    repeats: int
    blocks: Mapping[str, Timing]
    aggregation: Mapping[str, Timing]
    refinement: Mapping[str, Timing]
    factor: float = 1.0
    error: float = 0.0
    load: Any = None

    def predict(self, net: SubNet) -> float:
        """Return the predicted milliseconds of a sub-network."""
        try:
            total = self.aggregation[str(net.scales)].p50
            total += self.refinement["whole" if net.refine is None else f"{net.refine[0]}.{net.refine[1]}"].p50
            for s, stage in enumerate(net.stages):
                total += sum(self.blocks[f"{s}.{min(b, 1)}.{k}.{e}"].p50 for b, (k, e) in enumerate(stage))
        except KeyError as error:
            raise ValueError(f"the latency table has no entry {error}: it was made for another space") from None
        return self.factor * total


@torch.no_grad()
def time_call(call: Callable[[], object], device: torch.device, repeats: int, warmup: int = 3) -> Timing:
    for _ in range(warmup):
        call()
    settle(device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        settle(device)
        times.append((time.perf_counter() - start) * 1e3)
    last = max(0, round(0.9 * (len(times) - 1)))
    return Timing(statistics.median(times), sorted(times)[last])


def measure_net(net: ElasticStereo, sub_net: SubNet, size: tuple[int, int], repeats: int) -> Timing:
    """Time a sub-network, extracted, on one pair of this size."""
    first = next(net.parameters())
    plain = net.extract(sub_net).eval()
    view = torch.randn(1, 3, *size, dtype=first.dtype, device=first.device)
    return time_call(lambda: plain(view, view), first.device, repeats)


def build_table(
    net: ElasticStereo, size: tuple[int, int], repeats: int = 30, seed: int = 0, on_part: Progress | None = None
) -> LatencyTable:
    """Measure every part of every sub-network on the network's device; weights do not matter.

    ``size``: (height, width) of the images; ``seed``: for drawing the whole networks that correct the sums;
    ``on_part``: called with (number done, number of all).
    """
    check_count("repeats", repeats)
    first = next(net.parameters())
    device, space = first.device, net.space
    view = torch.randn(1, 3, *size, dtype=first.dtype, device=device)
    check_size(view, view, net.multiple)
    places = min(2, space.depths[-1])
    parts = len(net.features) * places * len(space.kernels) * len(space.expands) + 8
    done = count(1)

    def tick() -> None:
        if on_part is not None:
            on_part(next(done), parts)

    blocks: dict[str, Timing] = {}
    maps = _maps(net, size, view)
    for s, stage in enumerate(net.features):
        for b in range(places):
            block: Any = stage[b]  # type: ignore[index]
            x, known = maps[s][b], {}
            for k in space.kernels:
                for e in space.expands:
                    kind = (k, block.middle(e))
                    if kind not in known:
                        plain = block.extract(k, e).eval()
                        known[kind] = time_call(lambda: (plain(x), plain(x)), device, repeats)  # noqa: B023
                    blocks[f"{s}.{b}.{k}.{e}"] = known[kind]
                    tick()
    aggregation = {str(scales): _aggregation(net, scales, maps, repeats) for scales in space.scales}
    cuts: list[tuple[int, int] | None] = [(w, d) for w in space.refine_widths for d in space.refine_depths] or [None]
    refinement = {
        "whole" if cut is None else f"{cut[0]}.{cut[1]}": _refinement(net, cut, view, repeats) for cut in cuts
    }
    table = LatencyTable(
        str(device), size, str(first.dtype).removeprefix("torch."), torch.get_num_threads(), torch.__version__, repeats,
        blocks, aggregation, refinement,
    )  # fmt: skip
    rng, pairs = random.Random(seed), []
    for _ in range(8):
        chosen = net.sample(rng)
        pairs.append((measure_net(net, chosen, size, repeats).p50, table.predict(chosen)))
        tick()
    factor = sum(m for m, _ in pairs) / sum(p for _, p in pairs)
    error = max(abs(factor * p - m) / m for m, p in pairs)
    return replace(table, factor=factor, error=error)


@torch.no_grad()
def _maps(net: ElasticStereo, size: tuple[int, int], view: Tensor) -> list[list[Tensor]]:
    """Return, by stage, inputs for the stage's first and later blocks: noise of the right shape."""
    found, channels, (height, width), stride = [], 3, size, 3
    for stage in net.features:
        block: Any = stage[0]  # type: ignore[index]
        first = view.new_empty(1, channels, height, width).normal_()
        channels, height, width = block.c_out, height // stride, width // stride
        found.append([first, view.new_empty(1, channels, height, width).normal_()])
        stride = 2
    return found


def _aggregation(net: ElasticStereo, scales: int, maps: list[list[Tensor]], repeats: int) -> Timing:
    plain = net.aggregation.fresh(scales).to(maps[0][0].device, maps[0][0].dtype).eval()
    features = [pair[1] for pair in maps[:scales]]

    def call() -> list[Tensor]:
        volumes = [correlation(x, x, width) for x, width in zip(features, plain.widths)]
        return [soft_argmax(volume) for volume in plain(volumes)]

    return time_call(call, features[0].device, repeats)


def _refinement(net: ElasticStereo, cut: tuple[int, int] | None, view: Tensor, repeats: int) -> Timing:
    height, width = view.shape[2:]
    steps = [step.extract(cut).to(view.device, view.dtype).eval() for step in net.refinement]  # type: ignore[operator]
    coarse = view.new_ones(1, height // 3, width // 3)

    def call() -> Tensor:
        small = nn.functional.interpolate(view, (height // 2, width // 2), mode="bilinear", align_corners=False)
        middle = steps[0](coarse, small, small)
        finest: Tensor = steps[1](middle, view, view)
        return finest

    return time_call(call, view.device, repeats)
