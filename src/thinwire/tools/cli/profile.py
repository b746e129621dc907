"""``thinwire profile``: how long a model computes, tensor by tensor."""

from __future__ import annotations

import argparse
import json as json_module
import os
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.core.events import python, tell_event
from thinwire.tools.cli.console import Device, Json, check_output, plain_table, progress, watched_load

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.core.pricing.profiles import ModelProfile

_ROWS = 12
_SECONDS = 40.0


def profile(
    model: Annotated[
        str, typer.Argument(help="chargpt, mlp, resnet18, bert-small or module:function; options as in mlp:width=512.")
    ],
    steps: Annotated[int, typer.Option(help="Timed steps; fewer if they take more than 40 s.")] = 20,
    warmup: Annotated[int, typer.Option(help="Untimed steps before the timed ones.")] = 5,
    ranks: Annotated[
        int, typer.Option(help="Processes that compute at the same time, as on a machine with that many ranks.")
    ] = 1,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="File for the profile.")] = Path("profile.json"),
    json: Json = False,
) -> None:
    """Time a model's forward pass by module and its backward pass by gradient."""
    from rich.console import Console

    from thinwire.tools.bench.device import check_device
    from thinwire.tools.bench.models.registry import check_model

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("thinwire profile starts its own processes: use --ranks instead of torchrun")
    if steps < 1 or warmup < 0 or ranks < 1:
        raise ValueError(f"--steps {steps} and --ranks {ranks} must be at least 1, --warmup {warmup} not negative")
    check_output("--out", out)
    check_device(device)
    check_model(model)
    with watched_load(ranks) as load:
        if ranks == 1:
            found = _here(model, steps, warmup, device)
        else:
            found = _several(model, steps, warmup, ranks, device)
    text = json_module.dumps(load.with_load(json_module.loads(found.to_json())))
    out.write_text(text + "\n")
    console = Console(stderr=json)
    if json:
        typer.echo(text)
    else:
        console.print(profile_table(found))
    for sentence in profile_sentences(found):
        console.print(sentence, markup=False)
    console.print(f"written: {out} ({found.hash})")
    console.print(f"next: thinwire probe, then thinwire plan {out} --costs costs.json", markup=False)


def _here(model: str, steps: int, warmup: int, device: str) -> ModelProfile:
    with progress(f"building {model}", steps + warmup) as bar:
        return _profile(model, steps, warmup, 0, 1, device, lambda done, total: bar(completed=done, description=model))


def _profile(
    model: str, steps: int, warmup: int, rank: int, ranks: int, device: str, on_step: Callable[[int, int], None]
) -> ModelProfile:
    import torch

    from thinwire.predict.measure import profile_model
    from thinwire.tools.bench.device import rank_device
    from thinwire.tools.bench.models.registry import build_model, loss_of

    # On "cpu" a model stays where its own function puts it: nothing is exchanged, so it may be anywhere.
    workload = build_model(model, device=None if device == "cpu" else rank_device(device))
    together = f"{ranks} processes at once" if ranks > 1 else ""
    if ranks > 1:
        torch.distributed.barrier()
    return profile_model(
        workload.model,
        count(),
        loss_of(workload, rank),
        steps=steps,
        warmup=warmup,
        name=workload.name,
        batch=", ".join(filter(None, (workload.describe, together))),
        seconds=_SECONDS,
        on_step=on_step,
    )


def _several(model: str, steps: int, warmup: int, ranks: int, device: str) -> ModelProfile:
    """Return the profile of the slowest of several processes that compute at the same time."""
    from thinwire.core.pricing.profiles import ModelProfile
    from thinwire.tools.cli.ranks import follow
    from thinwire.tools.lab import Cluster

    with tempfile.TemporaryDirectory(prefix="thinwire-profile-") as folder:
        command = python("-m", "thinwire.tools.cli.profile", "--model", model, "--out", folder)
        command += ["--steps", str(steps), "--warmup", str(warmup), "--device", device]
        follow(Cluster(ranks, ranks), command, timeout_seconds=600)
        profiles = [ModelProfile.from_json(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return max(profiles, key=lambda p: p.forward_seconds + sum(p.backward_seconds))


def main() -> None:
    """Run one of several processes, with torchrun's environment variables set."""
    import torch.distributed as dist

    from thinwire.tools.bench.device import prepare_rank

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", required=True, type=int)
    parser.add_argument("--warmup", required=True, type=int)
    parser.add_argument("--device", required=True)
    words = parser.parse_args()
    dist.init_process_group(prepare_rank(words.device))
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def report(done: int, total: int) -> None:
        if rank == 0:
            tell_event({"done": done / total, "text": words.model})

    found = _profile(words.model, words.steps, words.warmup, rank, ranks, words.device, report)
    (words.out / f"{rank}.json").write_text(found.to_json())
    dist.barrier()
    dist.destroy_process_group()


def profile_table(profile: ModelProfile) -> Table:
    """Return the modules that take the longest, in forward order."""
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
    """Say what the figures mean for an exchange."""
    from thinwire.core.words import rate

    backward, count = sum(profile.backward_seconds), profile.elements * profile.dtype_bytes
    said = [f"{len(profile.tensors)} gradients, {count / 1e6:.1f} MB a step"]
    if backward:
        said.append(
            f"backward could hide the exact average of 2 ranks from {rate(count / backward)} on, of many from "
            f"{rate(2 * count / backward)}; start-ups come on top"
        )
    return said


if __name__ == "__main__":
    main()
