"""Options that several verbs share: records that verbs inherit, and what these options describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.tools.cli.verb import Verb, argument, option

if TYPE_CHECKING:
    from thinwire.tools.lab import Cluster

MODEL = "chargpt, mlp, resnet18, bert-small or module:function; options as in mlp:width=512."


def numbered(words: Sequence[str] | None, count: int, what: str, example: str) -> list[tuple[int, float]]:
    """Read ``3:2``, a number for the fourth of ``count``, as often as it is repeated or listed with commas.

    ``what`` they are: "NODE" or "RANK".
    """
    found = []
    for word in ",".join(words or []).split(",") if words else []:
        left, _, right = word.partition(":")
        try:
            pair = int(left), float(right)
        except ValueError:
            raise ValueError(f"{word!r} is not {what}:NUMBER; use for example {example}") from None
        if not (0 <= pair[0] < count and 0 < pair[1] < math.inf):
            kind = what.lower()
            raise ValueError(f"{word!r}: there are {kind}s 0 to {count - 1}, and the number must be above 0")
        found.append(pair)
    return found


class JsonOption(Verb):
    json: bool = option(False, "Print the result as JSON on stdout.", end=3)


class PlotOption(Verb):
    """A verb whose result has a "picture"."""

    plot: Path | None = option(None, "Also plot the result to this .png, .svg or .html file.", writes="plot", end=2)


class ThreadsOption(Verb):
    threads: int = option(1, "Number of torch's threads, on which times depend.", least=1)


class KeysOption(Verb):
    keys: Path | None = option(None, "This machine's directory from `thinwire keys new`, for TLS on both sides.")


class DeviceOption(Verb):
    device: str = option("cpu", "Where ranks compute: cpu, or cuda: this machine's GPUs, which ranks may share.", end=1)


class LinkOptions(Verb):
    """The links of an emulated cluster; each of these may be several words, one per node."""

    panel: ClassVar[str | None] = "The emulated network"

    link: str = option("unlimited", "Rate of each node's link, such as 1gbit, or one per node: 1gbit,100mbit.")
    delay: str = option("0", "One-way delay from each node, such as 25ms, or one per node.")
    jitter: str = option("0", "By how much a packet's delay may differ, such as 2ms, or one per node.")
    loss: str = option("0", "Share of each node's packets that get lost, such as 0.1%, or one per node.")
    congestion: str | None = option(None, "TCP's congestion control: cubic, bbr or reno; by default cubic.")

    def linked(self, workers: int, ranks_per_node: int = 1) -> Cluster:
        from thinwire.tools.lab import Cluster

        links = (self.link, self.delay, self.jitter, self.loss, self.congestion)
        return Cluster.parse(workers, ranks_per_node, *links)


class LabOptions(LinkOptions):
    """An emulated cluster on this machine."""

    panel: ClassVar[str | None] = LinkOptions.panel

    workers: int = option(2, "Total number of ranks.")
    ranks_per_node: int = option(1, "Ranks that share a node and its link.")

    @property
    def cluster(self) -> Cluster:
        return self.linked(self.workers, self.ranks_per_node)

    @property
    def wire(self) -> dict[str, Any]:
        """The links in words, None if nothing slows them, and the bits per second of the slowest, None: no limit."""
        cluster = self.cluster
        slow = None if cluster.wire == "unlimited" else cluster.wire
        return {"link": slow, "link_bits": min((rate for rate in cluster.links if rate), default=None)}


class PlanOptions(JsonOption):
    """What a prediction is for: a model, a network and the devices."""

    model: str | None = argument(
        None,
        "resnet50, resnet152, densenet201, vgg16, bert-base, bert-large, gpt2; a file from thinwire profile; or a "
        "model of the bench or module:function, which is measured here.",
    )
    link: str | None = option(None, "Rate of each machine's link, such as 1gbit; by default 10gbit.")
    delay: str | None = option(None, "One-way delay between machines, such as 25ms; by default 50us, a start-up.")
    loss: str = option("0%", "Share of packets that get lost, such as 0.1%.")
    congestion: str = option("cubic", "TCP's congestion control: cubic or bbr.", choices=("cubic", "bbr"))
    costs: Path | None = option(None, "Measured costs: a file from thinwire probe or thinwire kfac calibrate.")
    workers: int | None = option(None, "Total number of ranks; by default that of --costs, or 16.", least=1, most=65536)
    batch_size: int | None = option(None, "Samples per rank, for the built-in models.")
    device: str | None = option(
        None, "Assumed rates: cpu, t4, v100, a100 or h100; by default a100 for built-in models, else cpu."
    )
    device_flops: float | None = option(None, "FLOP/s that training sustains, for the built-in models.")
    profile: Path | None = option(None, "The model, as a file from thinwire profile.")

    ranks_per_node: int | None = 1  # this and the next three are options of ``thinwire plan`` alone
    methods: str | None = "ssgd"
    speeds: str | None = None
    worth: Path | None = None
