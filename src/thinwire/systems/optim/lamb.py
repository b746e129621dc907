"""LAMB: Adam in which each layer's step is a share of its own norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.checks import check_flag, check_number
from thinwire.core.methods.decoupling import deferring
from thinwire.engine.sync import GradientSync
from thinwire.systems.optim.advance import step
from thinwire.systems.optim.base import GroupTensors, LayerWise
from thinwire.systems.optim.moments import Adam, moments, shrinkage
from thinwire.systems.optim.norms import Layers
from thinwire.systems.optim.pto import NormSharding


class LAMB(LayerWise):
    """Layer-wise adaptive moments (You et al. 2020, arXiv 1904.00962): AdamW for very large batches of transformers.

    Per tensor, in fp32, with ``g_all`` all gradients together::

        g' = g / max(1, |g_all| / max_grad_norm)
        m <- beta1 * m + (1 - beta1) * g';   v <- beta2 * v + (1 - beta2) * g'^2
        u = m^ / (sqrt(v^) + eps) + weight_decay * w                      with m^, v^ corrected for their start at 0
        w <- w - lr * ratio * u;   ratio = |w| / |u|;   1 if |w| or |u| is 0

    The ratio applies to tensors with weight decay. Tensors of at most one dimension have none (``skip="1d"``);
    ``adapt_all=True`` gives them a ratio nevertheless.

    The step is a few calls for all tensors, and the host never waits. Parameters are fp32 (or fp64), or bf16 with an
    fp32 master in the state. Every option except ``max_grad_norm``, ``parallel``, ``partition`` and ``scaler`` can
    differ between groups.

    Args:
        params: parameters, named parameters or groups, as for ``torch.optim``.
        lr, betas, eps: as in the formula.
        weight_decay: decoupled from the moments.
        max_grad_norm: largest norm of all gradients together that a step uses; None: no limit.
        adapt_all: ratios for tensors without decay, too ("nvlamb").
        skip: "1d", "all" (a group without decay) or None (all decay).
        maximize: maximise instead of minimise.
        parallel, partition, scaler: as for :class:`~thinwire.optim.LARS`; u is computed on every rank.

    Raises:
        ValueError: a number is out of range, or a name is unknown.
        TypeError: fp16 parameters.

    Differences from the paper: gradients are clipped by their global norm first, and tensors without decay are not
    adapted, both as in NVIDIA's implementation; the ratio's phi is the identity.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = 1.0,
        adapt_all: bool = False,
        skip: str | None = "1d",
        maximize: bool = False,
        parallel: str | None = None,
        partition: str = "cost",
        scaler: Any = None,
    ) -> None:
        if max_grad_norm is not None:
            check_number("max_grad_norm", max_grad_norm, least=0)
            if not max_grad_norm:
                raise ValueError("max_grad_norm=0 would stop training: give a norm above 0, or None not to clip")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm,
            "adapt_all": adapt_all, "skip": skip, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, NormSharding(parallel, partition), scaler)

    def check_group(self, group: dict[str, Any]) -> None:
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"betas={betas!r} must be two numbers")
        for i, beta in enumerate(betas):
            check_number(f"betas[{i}]", beta, least=0, below=1)
        check_number("eps", group["eps"], least=0)
        check_flag("adapt_all", group["adapt_all"])
        limits = {g["max_grad_norm"] for g in self.param_groups}
        if len(limits) > 1:
            raise ValueError("max_grad_norm is for all gradients together: give one, to LAMB itself and not to a group")

    def attached(self, sync: GradientSync, scaler: Any) -> Any:
        options = deferring(method := sync.services.method)
        limit = self.param_groups[0]["max_grad_norm"]
        if options is not None and options.update_in_step is not True and limit is not None:
            raise ValueError(
                f"max_grad_norm={limit:g} needs all gradients at once, and {method.name} updates parameters "
                "bucket by bucket: give max_grad_norm=None and call sync.clip_grad_norm_, or attach with "
                "update_in_step=True"
            )
        return super().attached(sync, scaler)

    def prepare(self, works: Sequence[GroupTensors]) -> list[Layers]:
        """Compute the moments and the updates u; ratios are of weights and u."""
        limit = works[0].group["max_grad_norm"] if works else None
        shrink = None if limit is None else shrinkage([g for work in works for g in work.gradients], float(limit))
        found = []
        for work in works:
            group = work.group
            adapted = range(len(work.weights)) if group["adapt_all"] else work.adapted if group["weight_decay"] else []
            work.chosen = list(adapted)
            squares = _update(work, shrink)
            layers = Layers(work.weights, work.updates).part(work.chosen)
            layers.squares = squares.get(tuple(work.chosen))
            found.append(layers)
        return found

    def update(self, work: GroupTensors, ratios: Tensor | None) -> None:
        rate, chosen = float(work.group["lr"]), set(work.chosen)
        rest = [i for i in range(len(work.weights)) if i not in chosen]
        for indices, some in ((work.chosen, ratios), (rest, None)):
            if indices:
                step([work.weights[i] for i in indices], [work.updates[i] for i in indices], some, rate)


def _update(work: GroupTensors, shrink: Tensor | None) -> dict[tuple[int, ...], Tensor | None]:
    """Advance the moments of one group; return squares of weights and u, by the tensors that they are of."""
    group, lists = work.group, (work.weights, work.gradients, work.held("exp_avg"), work.held("exp_avg_sq"))
    decaying = set(work.adapted) if group["weight_decay"] else set()
    parts: dict[tuple[float, bool], list[int]] = {}
    for i, state in enumerate(work.states):  # steps are on the host, as in torch.optim
        state["step"] = state.get("step", torch.zeros(())) + 1
        parts.setdefault((float(state["step"]), i in decaying), []).append(i)
    updates: dict[int, Tensor] = {}
    found: dict[tuple[int, ...], Tensor | None] = {}
    for (number, decays), part in parts.items():
        decay, sign = group["weight_decay"] if decays else 0.0, -1.0 if group["maximize"] else 1.0
        adam = Adam(group["betas"][0], group["betas"][1], group["eps"], number)
        w, g, m, v = ([some[i] for i in part] for some in lists)
        made, found[tuple(part)] = moments(w, g, m, v, shrink, sign, decay, adam)
        updates.update(zip(part, made))
    work.updates = [updates[i] for i in range(len(work.weights))]
    return found
