"""The question of ``thinwire plan``: its options and files become a profile, a cluster, prices and candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.methods.registry import candidates, label_of, method
from thinwire.core.pricing.costs import Costs
from thinwire.core.pricing.profiles import BUILTIN, ModelProfile, builtin
from thinwire.core.pricing.wire_model import carried
from thinwire.core.program import Method, Topology
from thinwire.core.words import counted
from thinwire.engine.local.settings import CANDIDATES
from thinwire.predict.choose import DEVICES, DeviceSpec, resolved
from thinwire.predict.choose.worth import WorthOf, between, read_worth, shipped
from thinwire.predict.measure.machine import usable_cores
from thinwire.predict.timeline import Timeline, simulate
from thinwire.tools.bench.rows import parse_rows, priced
from thinwire.tools.bench.words import check_module, nearest, split_options
from thinwire.tools.cli.console import progress, read_record, watched_load
from thinwire.tools.cli.measure import ProfileVerb
from thinwire.tools.lab import parse_delay, parse_loss, parse_rate

if TYPE_CHECKING:
    from thinwire.tools.cli.options import PlanOptions

_START_SECONDS = 50e-6  # of a message, on any wire


@dataclass(frozen=True)
class Question:
    """What determines an answer. Both dense forms are among ``candidates``; ``named``: labels of the user's.

    With ``network``, exchanges of ``measured`` replace the assumed network. ``worth`` None: the table in the package.
    ``load``: of this machine, if the model was measured now. ``speeds``: of the workers, the fastest, 1, first;
    (): all are as fast.
    """

    profile: ModelProfile
    candidates: tuple[tuple[str, Method], ...]
    named: tuple[str, ...]
    topology: Topology
    ranks_per_node: int
    device: DeviceSpec
    bits_per_second: float
    latency_seconds: float
    delay_seconds: float
    loss: float
    bbr: bool
    measured: Costs | None
    network: bool
    worth: WorthOf | None = None
    load: Mapping[str, Any] | None = None
    speeds: tuple[float, ...] = ()

    @property
    def where(self) -> dict[str, Any]:
        """How methods run on these devices: arguments of ``choose`` and ``simulate``; without speeds, of ``knee``."""
        slowdown = {"slowdown": [1 / speed for speed in self.speeds]} if self.speeds else {}
        return {"backend": self.device.backend, "shared_compute": self.device.shared_compute, **slowdown}

    @property
    def worth_of(self) -> WorthOf | None:
        return between(self.worth or shipped()) if self.speeds else self.worth

    @property
    def setting(self) -> tuple[ModelProfile, Topology, Costs]:
        return self.profile, self.topology, self.prices(self.topology)

    @property
    def told_speeds(self) -> str:
        return ", ".join(f"{speed:g}" for speed in self.speeds)

    def resolved(self, method: Method) -> Method:
        """Return a method with what it chooses itself in this setting."""
        return resolved(method, *self.setting, worth=self.worth_of, **self.where)

    def simulated(self, method: Method) -> Timeline:
        """Return a step, or a period, of a method as it is resolved for this setting."""
        return simulate(self.resolved(method), *self.setting, **self.where)

    def prices(self, topology: Topology) -> Costs:
        assumed = self.assumed(self.bits_per_second, topology)
        if not self.network or self.measured is None:
            return assumed
        return dataclasses.replace(assumed, exchanges=self.measured.exchanges)

    def assumed(self, bits_per_second: float, topology: Topology) -> Costs:
        """Return the costs on an assumed network, with measured compute as far as available."""
        known = self.measured
        return Costs.of_link(
            carried(bits_per_second, 2 * self.delay_seconds, self.loss, bbr=self.bbr),
            self.latency_seconds,
            topology.world_size,
            self.ranks_per_node,
            node_bits_per_second=self.device.node_bits_per_second,
            node_latency_seconds=self.device.node_latency_seconds,
            trees=self.device.backend == "nccl",
            delay_seconds=self.delay_seconds,
            compute={**self.device.compute(), **(known.compute if known else {})},
            cpu_share=known.cpu_share if known else None,
        )

    @property
    def network_provenance(self) -> str:
        return "measured" if self.network else "assumed"

    def describe_network(self) -> str:
        if self.network:
            return "network of --costs"
        long = f", {self.delay_seconds * 1e3:g} ms one way" if self.delay_seconds else ""
        lossy = f", {self.loss:.3g} of the packets lost" if self.loss else ""
        return f"{self.bits_per_second / 1e9:g} Gbit/s, {self.latency_seconds * 1e6:g} us{long}{lossy}"

    def to_data(self) -> dict[str, Any]:
        assumed = ("bits_per_second", "latency_seconds", "delay_seconds", "loss")
        return {
            "model": self.profile.name,
            "model_source": self.profile.source,
            "model_provenance": self.profile.provenance,
            "workers": self.topology.world_size,
            "ranks_per_node": self.ranks_per_node,
            "device": self.device.name,
            "backend": self.device.backend,
            "network": self.network_provenance,
            **{name: None if self.network else getattr(self, name) for name in assumed},
            **({} if self.load is None else {"load": self.load}),
            **({"speeds": self.speeds} if self.speeds else {}),
        }


def read_question(asked: PlanOptions) -> Question:
    if asked.model is None and asked.profile is None:
        raise ValueError("give a model: a built-in name such as resnet50, or a file from thinwire profile")
    bits = parse_rate("10gbit" if asked.link is None else asked.link)
    seconds = _START_SECONDS if asked.delay is None else parse_delay(asked.delay)
    lost, far = parse_loss(asked.loss), max(0.0, seconds - _START_SECONDS)
    measured = None if asked.costs is None else read_record(asked.costs, Costs)
    worth = None if asked.worth is None else read_worth(asked.worth)
    network = measured is not None and asked.link is None
    if network and (asked.delay is not None or lost):
        raise ValueError(
            "--delay and --loss belong to an assumed network: give --link too, or leave it out to use --costs"
        )
    known = [key for key in measured.exchanges if key[2] > 1] if measured is not None and network else []
    if network and not known:
        raise ValueError(f"{asked.costs} contains no exchange between ranks: probe at least two, or give --link")
    workers, ranks_per_node = asked.workers, asked.ranks_per_node
    if workers is None and asked.speeds is not None:
        workers = len(asked.speeds.split(","))
    elif workers is None:
        workers = max((members for _, scope, members in known if scope == "world"), default=16)
    if ranks_per_node is None:
        ranks_per_node = max((members for _, scope, members in known if scope == "node"), default=1)
        ranks_per_node = ranks_per_node if workers % ranks_per_node == 0 else 1
    if workers % ranks_per_node:
        raise ValueError(f"--workers {workers} is not a multiple of --ranks-per-node {ranks_per_node}")
    candidates, named = read_methods(asked.methods)
    assumed = read_device(asked.device, built_in=asked.profile is None and asked.model in BUILTIN)
    model, load = read_model(asked, assumed)
    if not model.elements:
        raise ValueError(f"{asked.profile or asked.model}: the profile contains no gradients: there is nothing to send")
    return Question(
        model, candidates, named, Topology(workers, ranks_per_node), ranks_per_node, assumed, float(bits),
        min(seconds, _START_SECONDS), far, lost, asked.congestion == "bbr", measured, network, worth, load,
        () if asked.speeds is None else read_speeds(asked.speeds, workers, ranks_per_node),
    )  # fmt: skip


def read_speeds(text: str, workers: int, ranks_per_node: int) -> tuple[float, ...]:
    """Return the speeds of all workers, the fastest first."""
    try:
        speeds = [float(word) for word in text.split(",")]
    except ValueError:
        speeds = []
    if len(speeds) != workers or not all(0 < speed <= 1 for speed in speeds) or 1 not in speeds:
        wanted = f"{counted(workers, 'speed')} above 0, of which the fastest is 1"
        raise ValueError(f"--speeds {text!r}: give {wanted}: for four workers such as 1,1,0.5,0.5")
    if any(len({*speeds[i : i + ranks_per_node]}) > 1 for i in range(0, workers, ranks_per_node)):
        raise ValueError(f"--speeds {text!r}: the {ranks_per_node} ranks of a machine must have the same speed")
    return tuple(sorted(speeds, reverse=True)) if min(speeds) < 1 else ()


def read_methods(text: str | None) -> tuple[tuple[tuple[str, Method], ...], tuple[str, ...]]:
    """Return the candidates, without text those that methods declare, and which were named; always both dense forms."""
    if text is None:
        labels = [label_of(*candidate) for candidate in (*candidates(), *CANDIDATES)]
        named: list[str] = []
    else:
        named = [part.strip().removeprefix("thinwire ") for part in text.split(",") if part.strip()]
        if not named:
            raise ValueError("no methods given; for example --methods acp:rank=4,topk:density=0.01")
        labels = list(named)
    made: list[tuple[str, Method]] = []
    for label in labels:
        row = parse_rows(label)[0]
        if (found := priced(row)) is None:
            raise ValueError(f"method {label!r} has no price: thinwire bench and thinwire race run it")
        if labels.count(label) > 1:
            raise ValueError(f"method {label!r} is given twice")
        made.append((label, found))
    for label in ("cast:dtype=bf16", "ssgd"):
        name, options = split_options(label)
        if name not in {m.name for _, m in made}:
            made.insert(0, (label, method(name, **options)))
    return tuple(made), tuple(named)


def read_device(name: str | None, *, built_in: bool) -> DeviceSpec:
    """Return the named device, else an A100 for built-in models and this machine's CPU for measured ones."""
    name = ("a100" if built_in else "cpu") if name is None else name.lower()
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; {nearest(name, DEVICES)}; for another one give --device-flops")
    return DEVICES[name]


def read_model(asked: PlanOptions, device: DeviceSpec) -> tuple[ModelProfile, Mapping[str, Any] | None]:
    """Return a built-in profile, one from a file, or a bench model measured now, then with the machine's load."""
    model, profile, flops = asked.model, asked.profile, asked.device_flops
    if profile is None and model in BUILTIN:
        flops = device.training_flops if flops is None else flops
        return builtin(model, batch_size=asked.batch_size, device_flops=flops), None
    if given := asked.given(("batch_size", "device_flops")):
        raise ValueError(f"{given} is for the built-in models; a measured model has its own times")
    if profile is not None:
        found = read_record(profile, ModelProfile)
        if model is not None and found.name not in (model, model.partition(":")[0]):
            raise ValueError(f"{profile} is the profile of {found.name!r}, not of {model!r}: leave one of them out")
        return found, None
    assert model is not None
    if model.endswith(".json") or (Path(model).is_file() and not model.endswith(".py")):
        return read_record(Path(model), ModelProfile), None
    return _measure(model, asked.workers or 16)


def _measure(model: str, workers: int) -> tuple[ModelProfile, Mapping[str, Any]]:
    import torch

    from thinwire.tools.bench.models.registry import BUILT_IN, check_model

    name, _ = split_options(model)
    if name in BUILTIN:
        raise ValueError(f"model {name!r} is built in and has no options: use --batch-size or --device-flops")
    if ":" not in name and name not in BUILT_IN:
        check_module(name, "model")
        raise ValueError(f"unknown model {name!r}; {nearest(name, [*BUILTIN, *BUILT_IN])}, a file or module:function")
    check_model(model)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(max(1, usable_cores() // workers))  # as the ranks would have here
        with watched_load(torch.get_num_threads()) as load, progress(f"measuring {model}") as bar:
            found = ProfileVerb(model=model, steps=5, warmup=2).measure(0, bar, seconds=7.0, repeats=3)
    finally:
        torch.set_num_threads(before)
    return found, load.record
