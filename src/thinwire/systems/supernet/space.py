"""Which sub-networks there are: the values that each dimension may take, and one choice of them.

EASNet (arXiv 2207.09796) cuts a stereo network along four dimensions: the kernel size and the width of every block, the
number of blocks of every stage, and the number of scales.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from thinwire.core.records import Record

Block = tuple[int, int]
"""(kernel size, expansion ratio) of one block."""


def round8(width: float) -> int:
    """Return the nearest multiple of 8 that is at least 8 and at least 0.9 of ``width``: a block's middle channels."""
    n = max(8, 8 * int((width + 4) // 8))
    return n + 8 if n < 0.9 * width else n


@dataclass(frozen=True)
class SubNet(Record):
    """One sub-network; hashable. It has no genes for skipped blocks, so equal networks compare equal.

    Attributes:
        stages: ``stages[s][b]`` is (kernel, expand) of block b of stage s; there are as many stages as scales.
        refine: (width, depth) of the refinement, if the space makes it elastic; else None.
    """

    called: ClassVar[str] = "a sub-network of `thinwire supernet`"

    stages: tuple[tuple[Block, ...], ...]
    refine: tuple[int, int] | None = None

    @property
    def scales(self) -> int:
        return len(self.stages)

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(map(len, self.stages))

    def __str__(self) -> str:
        stages = " ".join("".join(f"k{k}e{e}," for k, e in stage).rstrip(",") for stage in self.stages)
        return stages if self.refine is None else f"{stages} refine {self.refine[0]}x{self.refine[1]}"


@dataclass(frozen=True)
class Space:
    """The allowed values, ascending. A training phase samples from a smaller space than the network's.

    Attributes:
        kernels: sizes of the depth-wise kernels, odd.
        depths: blocks of a stage. expands: ratios of a block's middle to its input. scales: stages used.
        refine_widths, refine_depths: *extension, off by default*: channels and blocks of the refinement.
    """

    kernels: tuple[int, ...] = (3, 5, 7)
    depths: tuple[int, ...] = (2, 3, 4)
    expands: tuple[int, ...] = (2, 4, 6, 8)
    scales: tuple[int, ...] = (2, 3, 4)
    refine_widths: tuple[int, ...] = ()
    refine_depths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("kernels", "depths", "expands", "scales", "refine_widths", "refine_depths"):
            values = getattr(self, name)
            optional = name.startswith("refine")
            whole = isinstance(values, tuple) and all(isinstance(v, int) and v > 0 for v in values)
            if not whole or (not values and not optional) or list(values) != sorted(set(values)):
                raise ValueError(f"{name}={values!r} must be positive whole numbers, ascending, each once")
        if any(k % 2 == 0 for k in self.kernels):
            raise ValueError(f"kernels={self.kernels!r} must be odd, so that they have a centre")
        if bool(self.refine_widths) != bool(self.refine_depths):
            raise ValueError("refine_widths and refine_depths must be given together, or not at all")

    @property
    def largest(self) -> SubNet:
        """The sub-network with every dimension at its maximum."""
        return self.uniform(self.kernels[-1], self.depths[-1], self.expands[-1], self.scales[-1])

    @property
    def smallest(self) -> SubNet:
        """The sub-network with every dimension at its minimum."""
        small = (self.refine_widths[0], self.refine_depths[0]) if self.refine_widths else None
        return self.uniform(self.kernels[0], self.depths[0], self.expands[0], self.scales[0], small)

    def uniform(
        self, kernel: int, depth: int, expand: int, scales: int, refine: tuple[int, int] | None = None
    ) -> SubNet:
        """Return a sub-network with equal values in all blocks and stages; ``refine`` None: the widest and deepest."""
        if refine is None and self.refine_widths:
            refine = (self.refine_widths[-1], self.refine_depths[-1])
        net = SubNet((((kernel, expand),) * depth,) * scales, refine)
        self.check(net)
        return net

    def sample(self, rng: random.Random) -> SubNet:
        """Draw a random sub-network: kernel and expansion of every block, depth of every stage, the number of scales.

        Genes are drawn for all blocks, skipped or not, so that every draw consumes the same number of random numbers.
        """
        stages, blocks = self.scales[-1], self.depths[-1]
        kernels = [rng.choice(self.kernels) for _ in range(stages * blocks)]
        expands = [rng.choice(self.expands) for _ in range(stages * blocks)]
        depths = [rng.choice(self.depths) for _ in range(stages)]
        scales = rng.choice(self.scales)
        refine = None
        if self.refine_widths:
            refine = (rng.choice(self.refine_widths), rng.choice(self.refine_depths))
        genes = list(zip(kernels, expands))
        chosen = tuple(tuple(genes[s * blocks : s * blocks + depths[s]]) for s in range(scales))
        return SubNet(chosen, refine)

    def check(self, net: SubNet) -> None:
        """Raise ``ValueError``, naming the value, unless the sub-network is in the space."""
        genes = [("scales", net.scales, self.scales), *(("depth", len(stage), self.depths) for stage in net.stages)]
        for stage in net.stages:
            for kernel, expand in stage:
                genes += [("kernel", kernel, self.kernels), ("expansion", expand, self.expands)]
        for name, value, allowed in genes:
            if value not in allowed:
                raise ValueError(f"{name} {value} is outside the space, which has {_words(allowed)}")
        if (net.refine is None) != (not self.refine_widths):
            raise ValueError("the sub-network must name a refinement if, and only if, the space makes it elastic")
        if net.refine is not None and not (net.refine[0] in self.refine_widths and net.refine[1] in self.refine_depths):
            raise ValueError(
                f"refinement {net.refine} is outside the space, which has widths {_words(self.refine_widths)} "
                f"and depths {_words(self.refine_depths)}"
            )

    def count(self) -> int:
        """Return the number of sub-networks; two ratios that round to the same width count as two."""
        blocks = len(self.kernels) * len(self.expands)
        stage = sum(int(blocks**depth) for depth in self.depths)
        refinements = max(1, len(self.refine_widths) * len(self.refine_depths))
        return refinements * sum(int(stage**scales) for scales in self.scales)


def _words(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
