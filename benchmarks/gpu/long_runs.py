"""Whole runs, many side by side on one device: ``python benchmarks/gpu/long_runs.py --out benchmarks/results``.

What the last loss of a whole schedule is, row by row, with AdamW and with Muon for the matrices, at three rates each:
for that a card must train some hundred models in minutes. So rows with one optimizer, rate and number of steps are a
*stack*: each parameter holds the weights of all their workers, ``[workers, ...]``, and a product of all is one launch.
What they exchange is the library's own, run by ``LocalWorld`` and ``LocalRanks`` on views of the stack, so codecs,
residuals and the look ahead are defined nowhere else. Only Muon is written here, because torch's takes no stacks.

The model, its text and its schedule are those of ``thinwire race chargpt:... --steps``; on a GPU it computes in bf16.
*alone* is one worker; *accumulate* exchanges after every fourth batch the gradient of all four, at twice the rates. A
stack that would not end in time is left out. Writes ``gpu_long_runs.json`` after each. ``benchmarks/gpu/all.py`` runs
it last.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import DEVICE, machine, shown
from torch import Tensor, nn
from torch.func import functional_call

from thinwire.core.kernels.finite import every_finite
from thinwire.core.kernels.seeding import upload
from thinwire.core.methods.registry import method as of_registry
from thinwire.core.methods.ssgd import SSGD
from thinwire.core.program import LocalWorld
from thinwire.engine.local.settings import named_local
from thinwire.engine.local.travel import LocalRanks
from thinwire.tools.bench.models.registry import build_model
from thinwire.tools.bench.models.text import standard_library
from thinwire.tools.bench.row_on_rank import share_of_rate
from thinwire.tools.bench.rows import Row, parse_rows

BETAS, DECAY, CLIP, HELD_OUT = (0.9, 0.95), 0.1, 1.0, 64
TRAINED = f"beta2={BETAS[1]}:decay={DECAY}:clip={CLIP}:held_out={HELD_OUT}:scaled_init=true"
INNERS = ("adamw", "muon")
WORKERS = 2
LOCAL = ",".join(
    f"local:sync_every={every}:codec=int{bits}{look}"
    for every in (4, 8, 16)
    for bits in (2, 1)
    for look in ("", ":look=0.5")
)
ROWS, ACCUMULATE = f"ddp,alone,cast:dtype=int4,{LOCAL}", "accumulate:every=4"
WARM, PACED = 5, 10  # steps of a stack before its pace is taken, and from which


@dataclass(frozen=True)
class Size:
    """A model of the bench, how it is trained, and how many rows of it fit into a stack."""

    shape: str
    block: int
    batch: int
    steps: int
    rates: tuple[float, ...]  # the likeliest first
    rows: int

    @property
    def model(self) -> str:
        return f"chargpt:{self.shape}:block={self.block}:batch={self.batch}:{TRAINED}"


SIZES = {
    "tiny": Size("layers=2:width=32:heads=2", 16, 2, 8, (2e-3,), 15),
    "26m": Size("layers=8:width=512:heads=8", 128, 8, 2000, (1.2e-3, 7e-4, 2e-3), 15),
    "124m": Size("layers=10:width=1024:heads=16", 128, 8, 600, (6e-4, 3.5e-4, 1e-3), 8),
}


class StackedMuon(torch.optim.Optimizer):
    """``torch.optim.Muon(..., adjust_lr_fn="match_rms_adamw")`` for stacks of matrices, [workers, rows, columns]."""

    def __init__(self, stacks: Sequence[Tensor], lr: float, decay: float) -> None:
        super().__init__(stacks, {"lr": lr, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                held = self.state[p]["momentum"].lerp_(p.grad, 0.05)
                update = orthogonal(p.grad.lerp(held, 0.95))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-0.2 * max(p.shape[1:]) ** 0.5 * group["lr"])


def orthogonal(stack: Tensor) -> Tensor:
    """Five steps of Newton and Schulz for each matrix, in bf16."""
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class Member:
    """A row of a stack: how its workers, views of the stack, exchange gradients or weights."""

    def __init__(self, row: Row, weights: list[dict[str, Tensor]], gradients: list[dict[str, Tensor]]) -> None:
        self.row, self.weights, self._gradients = row, weights, gradients
        self._rounds: LocalRanks | None = None
        self._world: LocalWorld | None = None
        if (local := named_local(row.kind, row.options)) is not None:
            self._rounds = LocalRanks(local, weights)
        elif row.kind != "alone":
            self._world = LocalWorld(len(weights), plan=[list(weights[0])[::-1]])  # as gradients come
            self._method = SSGD() if row.kind in ("ddp", "accumulate") else of_registry(row.kind, **row.options)

    def look(self) -> None:
        if self._rounds is not None and self._rounds.settings.look is not None:
            self._rounds.look()

    def exchange(self) -> None:
        """Replace gradients by their mean."""
        if self._world is not None:
            for own, mean in zip(self._gradients, self._world.step(self._method, self._gradients)):
                torch._foreach_copy_(list(own.values()), [mean[name] for name in own])

    def turn(self) -> None:
        if self._rounds is not None:
            self._rounds.step()

    @torch.no_grad()
    def finish(self) -> bool:
        """Bring all workers' weights together. Return whether they are finite."""
        finite = bool(every_finite([x for own in self.weights for x in own.values()]))
        if self._rounds is not None and finite:
            self._rounds.finish()
        return finite


class Stack:
    """Rows that step together. ``rate``: the highest of the schedule; ``steps``: batches of each worker."""

    def __init__(self, size: Size, inner: str, rate: float, rows: Sequence[Row], steps: int, device: torch.device):
        self._size, self._rate, self._device = size, rate, device
        self.workload, self._corpus = build_model(size.model, 0, device), standard_library()
        self._every = int(rows[0].options.get("every", 1)) if rows[0].kind == "accumulate" else 1
        self._steps = steps // self._every
        workers = [1 if row.kind == "alone" else WORKERS for row in rows]
        self._draws = [(rank, part) for n in workers for rank in range(n) for part in range(self._every)]
        count = len(self._draws)
        named = list(self.workload.model.named_parameters())
        self._stack = {name: nn.Parameter(p.detach().expand(count, *p.shape).clone()) for name, p in named}
        for p in self._stack.values():
            p.grad = torch.zeros_like(p)
        self._gradients = [p.grad for p in self._stack.values() if p.grad is not None]
        views = [{name: p.detach()[i] for name, p in self._stack.items()} for i in range(count)]
        gradients = [{name: g[i] for name, g in zip(self._stack, self._gradients)} for i in range(count)]
        ends = torch.tensor(workers).mul(self._every).cumsum(0).tolist()
        self.members = [
            Member(row, views[begin:end], gradients[begin:end]) for row, begin, end in zip(rows, [0, *ends], ends)
        ]
        self._optimizers = optimizers(self._stack, inner, rate)

    def train(self, end: float) -> bool:
        """Train all rows; False if that would not end in time."""
        began = 0.0
        for step in range(self._steps):
            if step in (WARM, WARM + PACED):
                if self._device.type == "cuda":
                    torch.cuda.synchronize()
                pace, began = (time.monotonic() - began) / PACED, time.monotonic()
                if step > WARM and began + pace * (self._steps - step) > end:
                    return False
            if time.monotonic() > end:
                return False
            self._step(step)
        return True

    def _step(self, step: int) -> None:
        for member in self.members:
            member.look()
        self._losses(*self._batch(step)).sum().backward()
        for member in self.members:
            member.exchange()
        self._clip()
        last = (step + 1) * self._every - 1  # batch
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate * share_of_rate(last, self._steps * self._every)
            optimizer.step()
        torch._foreach_zero_(self._gradients)
        for member in self.members:
            member.turn()

    def _batch(self, step: int) -> list[Tensor]:
        """Return texts and targets, ``[workers, batch, block]``."""
        size, drawn = self._size, {}
        for rank, part in set(self._draws):
            at = step * self._every + part
            drawn[rank, part] = self._corpus.batch(size.batch, size.block, step=at, rank=rank)
        return [upload(torch.stack([drawn[one][side] for one in self._draws]), self._device) for side in (0, 1)]

    def _losses(self, text: Tensor, target: Tensor) -> Tensor:
        def one(weights: Mapping[str, Tensor], text: Tensor, target: Tensor) -> Tensor:
            logits = functional_call(self.workload.model, dict(weights), (text,))
            return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())

        fast = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        made: Tensor = torch.vmap(one)({name: p.to(fast) for name, p in self._stack.items()}, text, target)
        return made

    @torch.no_grad()
    def _clip(self) -> None:
        """Make no worker's gradient longer than ``CLIP``."""
        norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in self._gradients]).norm(dim=0)
        shares = (CLIP / (norms + 1e-6)).clamp(max=1)
        torch._foreach_mul_(self._gradients, [shares.view(-1, *[1] * (g.dim() - 1)) for g in self._gradients])

    def loss(self, member: Member) -> float | None:
        """The held-out loss of the weights that a user would save; None: it diverged."""
        if not member.finish():
            return None
        self.workload.model.load_state_dict(member.weights[0])
        return self.workload.held_out_loss()


def optimizers(stack: Mapping[str, nn.Parameter], inner: str, rate: float) -> list[torch.optim.Optimizer]:
    """As ``thinwire race chargpt:optimizer=...`` has them."""
    inside = [p for name, p in stack.items() if inner == "muon" and "blocks." in name and p.dim() == 3]
    rest = [p for p in stack.values() if not any(p is one for one in inside)]
    adamw = torch.optim.AdamW(rest, rate, BETAS, weight_decay=DECAY, fused=True)
    return [StackedMuon(inside, rate, DECAY), adamw] if inside else [adamw]


def stacks(size: Size) -> Iterator[tuple[str, float, Sequence[Row]]]:
    """Optimizer, rate and rows of each stack, in the order of their worth."""
    rows = parse_rows(ROWS)
    for rate in size.rates:
        for inner in INNERS:
            for begin in range(0, len(rows), size.rows):
                yield inner, rate, rows[begin : begin + size.rows]
            yield inner, 2 * rate, parse_rows(ACCUMULATE)


def best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lowest loss of each row, over its rates."""
    found: dict[Any, dict[str, Any]] = {}
    for row in sorted((row for row in rows if row["loss"] is not None), key=lambda row: row["loss"]):
        found.setdefault((row["size"], row["optimizer"], row["name"]), row)
    return [row for row in rows if row in found.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu_long_runs.json")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no stack that would not end in these")
    parser.add_argument("--size", nargs="*", choices=list(SIZES), help="default: 26m and 124m; on a CPU tiny")
    parser.add_argument("--steps", type=int, help="default: those of the size")
    parser.add_argument("--device", type=torch.device, default=DEVICE)
    told = parser.parse_args()
    end = time.monotonic() + told.seconds
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for name in told.size or (("26m", "124m") if told.device.type == "cuda" else ("tiny",)):
        size = SIZES[name]
        steps = told.steps or size.steps
        for inner, rate, some in stacks(size):
            began = time.monotonic()
            stack = Stack(size, inner, rate, some, steps, told.device)
            if stack.train(end):
                same = {"size": name, "parameters": stack.workload.parameters, "optimizer": inner, "rate": rate}
                same |= {"steps": steps, "block": size.block, "batch": size.batch}
                found = [{"name": one.row.label, **same, "loss": stack.loss(one)} for one in stack.members]
                rows += [{**row, "stack_seconds": time.monotonic() - began} for row in found]
            else:
                left_out.append(f"{name}, {inner}, rate {rate:g}: {', '.join(row.label for row in some)}")
            text = json.dumps({**machine(), "workers": WORKERS, "rows": rows, "left_out": left_out}, indent=1)
            (told.out / "gpu_long_runs.json").write_text(text + "\n")
    shown("Held-out loss after whole runs", ("size", "optimizer", "name", "rate", "steps", "loss"), best(rows))
    for what in left_out:
        print(f"left out, no time: {what}")


if __name__ == "__main__":
    main()
