"""``thinwire probe`` and ``thinwire profile``: what exchanges cost on a network, and how long a model computes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.events import tell_event
from thinwire.tools.cli.console import (
    Output,
    RunFailed,
    follow,
    plain_table,
    progress,
    under_torchrun,
    watched_load,
)
from thinwire.tools.cli.options import MODEL, DeviceOption, JsonOption, LabOptions
from thinwire.tools.cli.verb import argument, option, rules_of

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.core.pricing.costs import Costs
    from thinwire.core.pricing.profiles import ModelProfile
    from thinwire.predict.measure import ProbeResult


_SHOWN = (64 << 10, 1 << 20, 16 << 20)
_ROWS = 12


class CostsOptions(JsonOption):
    """A verb that measures costs for the planner, within a time."""

    seconds: float = option(40.0, "Seconds for the exchanges; what does not fit is skipped.", above=0)
    out: Path = option(Path("costs.json"), "File for the costs.", writes="file")

    def keep(self, costs: Costs, output: Output) -> None:
        kinds = [f"{len(costs.exchanges)} curves", f"{len(costs.compute)} of compute", costs.hash]
        output.write(self.out, costs.to_json(), f" ({', '.join(kinds)})")


class ProbeVerb(CostsOptions, LabOptions):
    """Measure every collective over message sizes: under torchrun on its network, otherwise in the lab.

    Under torchrun the ranks and the network are fixed, and the options of the emulated one are left out.

    Example: thinwire probe --workers 2 --link 100mbit
    """

    backend: str = option("auto", "auto, gloo or nccl; in the lab always gloo.", choices=("auto", "gloo", "nccl"))
    max_bytes: int = option(16 << 20, "Largest message of a rank, in bytes.")

    def run(self, output: Output) -> Any:
        from thinwire.core.words import rate
        from thinwire.predict.measure import verdict
        from thinwire.predict.measure.probe import message_sizes

        message_sizes(largest=self.max_bytes)
        joins = under_torchrun()
        first = not joins or os.environ["RANK"] == "0"
        output.console.quiet |= not first
        if joins and (given := self.given(rules_of(LabOptions))):
            raise ValueError(f"under torchrun the ranks and the network are fixed: leave out {given}")
        if not joins and self.backend == "nccl":
            raise ValueError("the lab's ranks use gloo; for nccl start the verb with torchrun")
        own = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if joins else self.workers
        with watched_load(own, quiet=not first) as load:
            result, note = (self._on_torchrun(first), "") if joins else self._in_lab()
        if not first:
            return None
        flow = result.flow_bits_per_second
        output.say(result.source + (f"; one flow alone: {rate(flow / 8)}" if flow else ""))
        output.say(*(probe_table(result, group) for group in dict.fromkeys(key[1:] for key in result.series)))
        output.say(*filter(None, [*verdict(result), note]))
        self.keep(result.costs, output)
        rest = "" if result.costs.exchanges else " --link 1gbit"
        output.say(f"next: thinwire profile MODEL, then thinwire plan profile.json --costs {self.out}{rest}")
        return load.with_load(json.loads(result.to_json()))

    def _on_torchrun(self, first: bool) -> ProbeResult:
        with progress("joining the ranks", 100, quiet=not first) as bar:
            try:
                return self._join(lambda done, text: bar(round(100 * done), description=text))
            except RuntimeError as error:  # torch's message about ranks that do not answer
                raise RunFailed(f"the ranks could not be probed: {str(error).splitlines()[0]}") from error

    def _join(self, on_progress: Callable[[float, str], Any]) -> ProbeResult:
        """Probe as a rank of torchrun's, or of the lab's."""
        import torch
        import torch.distributed as dist

        from thinwire.predict.measure import probe

        local, here = (int(os.environ.get(name, usual)) for name, usual in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
        backend = self.backend
        if backend == "auto":
            ready = torch.cuda.device_count() >= here and torch.cuda.is_available() and dist.is_nccl_available()
            backend = "nccl" if ready else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(local)
        dist.init_process_group(backend, timeout=timedelta(seconds=120))
        try:
            return probe(largest_bytes=self.max_bytes, seconds=self.seconds, on_progress=on_progress)
        finally:
            dist.destroy_process_group()

    def _in_lab(self) -> tuple[ProbeResult, str]:
        from thinwire.predict.measure import ProbeResult

        with tempfile.TemporaryDirectory(prefix="thinwire-probe-") as folder:
            path = Path(folder) / "result.json"
            command = replace(self, backend="gloo").rank_command(str(path))
            launched = follow(self.cluster, command, timeout_seconds=5 * self.seconds + 180)
            return ProbeResult.from_json(path.read_text()), launched.note

    def on_rank(self, *words: str) -> None:
        result = self._join(lambda done, text: tell_event({"done": done, "text": text}))
        if os.environ["RANK"] == "0":
            Path(words[0]).write_text(result.to_json())


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


class ProfileVerb(DeviceOption, JsonOption):
    """Time a model's forward pass by module and its backward pass by gradient.

    Example: thinwire profile mymodule:build --out profile.json
    """

    model: str = argument(..., MODEL)
    steps: int = option(20, "Timed steps; fewer if they take more than 40 s.", least=1)
    warmup: int = option(5, "Untimed steps before the timed ones.", least=0)
    workers: int = option(1, "Processes that compute at the same time, as on a machine with that many ranks.", least=1)
    out: Path = option(Path("profile.json"), "File for the profile.", writes="file")

    def run(self, output: Output) -> Any:
        from thinwire.tools.bench.device import check_device
        from thinwire.tools.bench.models.registry import check_model

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("thinwire profile starts its own processes: use --workers instead of torchrun")
        check_device(self.device)
        check_model(self.model)
        with watched_load(self.workers) as load:
            if self.workers > 1:
                found = self._slowest()
            else:
                with progress(f"building {self.model}", self.steps + self.warmup) as bar:
                    found = self.measure(0, lambda done, total: bar(completed=done, description=self.model))
        data = load.with_load(found)
        output.say(profile_table(found), *profile_sentences(found))
        output.write(self.out, json.dumps(data), f" ({found.hash})")
        output.say(f"next: thinwire probe, then thinwire plan {self.out} --costs costs.json")
        return data

    def measure(self, rank: int, on_step: Callable[..., Any], seconds: float = 40.0, repeats: int = 1) -> ModelProfile:
        """Return the fastest of several profiles of ``seconds`` each: other work on this machine only adds."""
        import torch

        from thinwire.predict.measure import profile_model
        from thinwire.tools.bench.device import rank_device
        from thinwire.tools.bench.models.registry import build_model, loss_of

        # On "cpu" a model stays where its own function puts it: nothing is exchanged, so it may be anywhere.
        workload = build_model(self.model, device=None if self.device == "cpu" else rank_device(self.device))
        batch = workload.describe
        if self.workers > 1:
            batch += f", {self.workers} processes at once"
            torch.distributed.barrier()
        found = (profile_model(workload.model, count(), loss_of(workload, rank), steps=self.steps, warmup=self.warmup,
                               name=workload.name, batch=batch, seconds=seconds, on_step=on_step)
                 for _ in range(repeats))  # fmt: skip
        return min(found, key=_seconds)

    def _slowest(self) -> ModelProfile:
        """Return the profile of the slowest of several processes that compute at the same time."""
        from thinwire.core.pricing.profiles import ModelProfile
        from thinwire.tools.lab import Cluster

        with tempfile.TemporaryDirectory(prefix="thinwire-profile-") as folder:
            follow(Cluster(self.workers, self.workers), self.rank_command(folder), timeout_seconds=600)
            profiles = [ModelProfile.from_json(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
        return max(profiles, key=_seconds)

    def on_rank(self, *words: str) -> None:
        import torch.distributed as dist

        from thinwire.tools.bench.device import prepare_rank

        dist.init_process_group(prepare_rank(self.device))
        rank = dist.get_rank()
        found = self.measure(rank, lambda done, total: tell_event({"done": done / total, "text": self.model}))
        (Path(words[0]) / f"{rank}.json").write_text(found.to_json())
        dist.barrier()
        dist.destroy_process_group()


def _seconds(profile: ModelProfile) -> float:
    return profile.forward_seconds + sum(profile.backward_seconds)


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
