"""Options that several verbs share: records that verbs inherit, and what these options describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.tools.cli.verb import Verb, option

if TYPE_CHECKING:
    from thinwire.tools.lab import Cluster

MODEL = "chargpt, mlp, resnet18, bert-small or module:function; options as in mlp:width=512."


class JsonOption(Verb):
    json: bool = option(False, "Print the result as JSON on stdout.", end=3)


class PlotOption(Verb):
    """A verb whose result has a "picture"."""

    plot: Path | None = option(None, "Also plot the result to this .png or .html file.", writes="plot", end=2)


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
