"""The two files of a surgery: each machine loads its own, so neither ever holds the other's layers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.systems.split.models import build, require, view_of
from thinwire.systems.split.plan import SplitPlan
from thinwire.systems.split.surgery import Back, Factors, Front, Sample, assemble, by_role, split_model


@dataclass(frozen=True)
class Half:
    role: str  # "edge" or "cloud"
    module: Front | Back
    plan: SplitPlan  # with which it was cut
    pair: str  # a hash over both halves, which the two ends compare
    notes: dict[str, Any]  # what else was saved with it, such as the task


def prepare(
    model: nn.Module,
    plan: SplitPlan,
    directory: str | Path,
    samples: Iterable[Sample] | None = None,
    notes: dict[str, Any] | None = None,
) -> str:
    """Cut a model once and write ``edge.safetensors`` and ``cloud.safetensors``, each end's half by the plan.

    Args:
        model: see ``split_model``.
        plan: where and how to cut.
        directory: created if needed.
        samples: see ``split_model``.
        notes: small JSON values to store in both files.

    Returns:
        The pair's id.

    Raises:
        ValueError: the model cannot be cut like this, or safetensors is not installed.
    """
    require("safetensors")
    halves = by_role(*split_model(model, plan, samples))
    pair = _pair_id(plan, halves)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = model.config
    for role, half in halves.items():
        facts = {
            "role": role, "plan": plan.to_json(), "pair": pair, "class": type(model).__name__,
            "config": config.to_dict(), "notes": notes or {},
        }  # fmt: skip
        write_half(half, facts, folder / f"{role}.safetensors")
    return pair


def write_half(half: nn.Module, facts: dict[str, Any], path: Path) -> None:
    """Write one file: parameters and buffers, and the facts as JSON."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in _tensors(half).items()}
    save_file(tensors, path, metadata={"thinwire": json.dumps(facts, default=str)})


def half_file(path: str | Path, role: str) -> Path:
    """Return the file of a half: the path itself, or the half's file in a directory written by ``prepare``."""
    return Path(path) / f"{role}.safetensors" if Path(path).is_dir() else Path(path)


def read_facts(path: str | Path, role: str | None = None) -> dict[str, Any]:
    """Read the facts of a file, without its tensors; ``role``: which half is expected, None: either."""
    require("safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            facts = json.loads((file.metadata() or {})["thinwire"])
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not a half of a model: thinwire split plan --out writes them ({error})") from error
    if not isinstance(facts, dict) or not {"role", "plan", "pair", "class", "config", "notes"} <= facts.keys():
        raise ValueError(f"{path} is not a half of a model: thinwire split plan --out writes them")
    if role not in (None, facts["role"]):
        raise ValueError(f"{path} is the half of the {facts['role']}, not of the {role}")
    return facts


def load_half(path: str | Path, role: str) -> Half:
    """Build a half from its file, or the directory that holds it; ``role``: which half is expected.

    No memory is allocated for the rest of the model.

    Raises:
        ValueError: it is not such a file.
    """
    file = half_file(path, role)
    facts = read_facts(file, role)
    from safetensors.torch import load_file

    plan = SplitPlan.from_json(facts["plan"])
    with torch.device("meta"):
        model = build(facts["class"], facts["config"])
        view = view_of(model)
        plan.check(len(view.layers(model)), view.hidden)
        rank = plan.rank if plan.kind == "lowrank" else 1
        factors = Factors.empty(view.intermediate, view.hidden, rank, plan.kept_directions)
        half = by_role(*assemble(view, model, plan, factors))[role]
    tensors = load_file(str(file))
    half.to_empty(device="cpu")
    wanted = _tensors(half)
    if wanted.keys() != tensors.keys() or any(wanted[name].shape != tensors[name].shape for name in wanted):
        raise ValueError(f"{file} does not hold the tensors that its plan and configuration ask for")
    first = next(tensor for tensor in tensors.values() if tensor.is_floating_point())
    half.to(first.dtype)
    with torch.no_grad():
        for name, tensor in _tensors(half).items():
            tensor.copy_(tensors[name])
    return Half(role, half, plan, facts["pair"], facts["notes"])


def _tensors(half: nn.Module) -> dict[str, Tensor]:
    """Return parameters and all buffers, including those that ``state_dict`` leaves out."""
    return {**dict(half.named_parameters()), **dict(half.named_buffers())}


def _pair_id(plan: SplitPlan, halves: dict[str, Front | Back]) -> str:
    made = hashlib.blake2b(plan.to_json().encode(), digest_size=16)
    for role, half in halves.items():
        for name, tensor in sorted(_tensors(half).items()):
            made.update(f"{role}:{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            made.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()
