"""What else large batches need: groups without decay, a learning-rate schedule, blocks that start as identity."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire.core.checks import check_count, check_number

_NORM = re.compile(r"Norm(\d[dD])?$")


def is_norm(module: nn.Module) -> bool:
    """Return whether a module normalises, by its class name: BatchNorm2d, LayerNorm, LlamaRMSNorm, ..."""
    return _NORM.search(type(module).__name__) is not None


def param_groups(
    model: nn.Module, weight_decay: float, *, lr: float | None = None, skip_lr_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Return two groups for any optimizer: weights, with decay and adapted; biases and norms' parameters, without.

    Args:
        model: its trainable parameters are grouped; shared ones once.
        weight_decay, lr: of the weights; of both groups (None: the optimizer's).
        skip_lr_scale: factor of the learning rate of biases and norms in :class:`~thinwire.optim.LARS`; others ignore
            it.

    Raises:
        ValueError: no trainable parameter, a negative number.
    """
    check_number("weight_decay", weight_decay, least=0)
    check_number("skip_lr_scale", skip_lr_scale, least=0)
    norms = {id(p) for module in model.modules() if is_norm(module) for p in module.parameters(recurse=False)}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the model has no trainable parameter; set requires_grad=True on what should be trained")
    plain = {id(p) for name, p in named if p.dim() <= 1 or id(p) in norms or name.rpartition(".")[2] == "bias"}
    decayed: dict[str, Any] = {"params": [p for _, p in named if id(p) not in plain], "weight_decay": weight_decay}
    kept: dict[str, Any] = {
        "params": [p for _, p in named if id(p) in plain],
        "weight_decay": 0.0,
        "skip": "all",
        "skip_lr_scale": skip_lr_scale,
    }
    groups = [group for group in (decayed, kept) if group["params"]]
    if lr is not None:
        check_number("lr", lr, least=0)
        for group in groups:
            group["lr"] = lr
    return groups


def scaled_lr(base_lr: float, batch: int, base_batch: int = 256) -> float:
    """Apply the linear scaling rule (Goyal et al. 2017, arXiv 1706.02677): ``base_lr * batch / base_batch``.

    Raises:
        ValueError: a rate is negative, or a batch below 1.
    """
    check_number("base_lr", base_lr, least=0)
    return base_lr * check_count("batch", batch) / check_count("base_batch", base_batch)


class WarmupPoly(LRScheduler):
    """See :func:`warmup_poly`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int, power: float, start: float,
        end: float,
    ) -> None:  # fmt: skip
        self.total_steps, self.warmup_steps = total_steps, warmup_steps
        self.power, self.start, self.end = power, start, end
        super().__init__(optimizer)

    def rate(self, peak: float, step: int) -> float:
        if step < self.warmup_steps:
            return self.start + (peak - self.start) * (step + 1) / self.warmup_steps
        gone = (min(step, self.total_steps) - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        left: float = (1 - gone) ** self.power
        return self.end + (peak - self.end) * left

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of all groups at this step."""
        return [self.rate(float(peak), self.last_epoch) for peak in self.base_lrs]


def warmup_poly(
    optimizer: torch.optim.Optimizer,
    *,
    total_steps: int,
    warmup_steps: int,
    power: float = 2.0,
    start: float = 0.0,
    end: float = 0.0,
) -> WarmupPoly:
    """Return a scheduler: linear up to each group's rate, then a polynomial down. Call its ``step()`` after each step.

    Step t < w: ``start + (peak - start) * (t + 1) / w``; then ``end + (peak - end) * (1 - (t - w) / (T - w))**power``.

    Args:
        optimizer: its groups' rates are the peaks.
        total_steps, warmup_steps: T, the step from which on the rate is ``end``; w.
        power, start, end: as in the formula.

    Raises:
        ValueError: no step is left after the warm-up, or a number is negative.
    """
    for name, value in (("power", power), ("start", start), ("end", end)):
        check_number(name, value, least=0)
    for name, count in (("total_steps", total_steps), ("warmup_steps", warmup_steps)):
        check_count(name, count, 0)
    if warmup_steps >= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be below total_steps={total_steps}")
    return WarmupPoly(optimizer, total_steps, warmup_steps, power, start, end)


def zero_last_norm(model: nn.Module, blocks: type[nn.Module] | tuple[type[nn.Module], ...]) -> int:
    """Set the scale of the last norm of each residual block to 0, so that the block starts as its shortcut.

    The last norm is the last one among the block's own children. A norm in a shortcut's container does not count,
    unless the block holds all its layers in containers. Returns how many norms were set.

    Raises:
        ValueError: there is no such block with a norm that has a scale.
    """
    found = 0
    for block in model.modules():
        if not isinstance(block, blocks):
            continue
        for modules in (block.children(), block.modules()):
            norms = [m for m in modules if is_norm(m) and isinstance(getattr(m, "weight", None), nn.Parameter)]
            if norms:
                nn.init.zeros_(norms[-1].weight)  # type: ignore[arg-type]
                found += 1
                break
    if not found:
        classes = blocks if isinstance(blocks, tuple) else (blocks,)
        names = ", ".join(c.__name__ for c in classes)
        raise ValueError(f"the model has no {names} with a norm that has a scale: name the class of its blocks")
    return found
