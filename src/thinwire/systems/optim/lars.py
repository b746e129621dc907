"""LARS: each layer's step is a share of its own norm."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from thinwire.core.checks import check_choice, check_flag, check_number
from thinwire.systems.optim.advance import Advance, advance
from thinwire.systems.optim.base import GroupTensors, LayerWise
from thinwire.systems.optim.norms import Layers, Rule
from thinwire.systems.optim.pto import NormSharding

logger = logging.getLogger("thinwire")


class LARS(LayerWise):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg, 2017, arXiv 1708.03888): SGD for very large batches.

    Per tensor, in fp32, with the learning rate gamma, the weight decay beta and the trust coefficient eta::

        ratio = eta * |w| / (|g| + beta * |w| + eps);   1 if |w| or |g| is 0
        v <- momentum * v + gamma * ratio * (g + beta * w);   w <- w - v

    Tensors of at most one dimension (biases, scales and shifts of norms) are *skipped*: ratio 1 and no decay. So the
    full gamma applies to them, which is 10 to 40 here. Without norm layers in the model that diverges: use
    ``skip_lr_scale=0.01`` then.

    The step is a few calls for all tensors, and the host never waits. Parameters are fp32 (or fp64), or bf16 with an
    fp32 master in the state. Every option except ``parallel``, ``partition`` and ``scaler`` can differ between groups.

    Args:
        params: parameters, named parameters or groups, as for ``torch.optim``.
        lr: gamma; typically raised over some epochs and then lowered (``optim.warmup_poly``).
        momentum: of v; 0 keeps no state.
        weight_decay, trust_coefficient, eps: beta, eta and eps of the formula.
        nesterov: step along the new v once more.
        clamp: (lowest, highest) ratio.
        decay_in_ratio: whether the denominator contains the decay term.
        momentum_holds: "update": v contains gamma, as in the paper; "scaled_gradient": gamma multiplies v at the end,
            as in NVIDIA's LARC. They differ when gamma changes.
        skip: "1d", "all" (a group that is not adapted) or None (nothing is skipped).
        skip_lr_scale: multiplies gamma for skipped tensors.
        maximize: maximise instead of minimise.
        parallel: "node" or "world": the ranks of a machine, or all, share the norms (:mod:`thinwire.optim.pto`);
            "auto": measure whether that pays; None: each rank computes all. Needs ``thinwire.attach``.
        partition: "cost" (longest layers first, to the least loaded rank) or "contiguous" (as many layers for each).
        scaler: the GradScaler in use, so that a step on scaled gradients is refused; ``attach(scaler=)`` sets it too.

    Raises:
        ValueError: a number is out of range, or a name is unknown.
        TypeError: fp16 parameters.

    Differences from the paper: tensors of one dimension are skipped (as in the four-minute ImageNet training, Jia et
    al. 2018, arXiv 1807.11205); the ratio is defined if a norm is 0; norms in one call rather than layer by layer.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        clamp: tuple[float, float] | None = None,
        decay_in_ratio: bool = True,
        momentum_holds: str = "update",
        skip: str | None = "1d",
        skip_lr_scale: float = 1.0,
        maximize: bool = False,
        parallel: str | None = None,
        partition: str = "cost",
        scaler: Any = None,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient,
            "eps": eps, "nesterov": nesterov, "clamp": clamp, "decay_in_ratio": decay_in_ratio,
            "momentum_holds": momentum_holds, "skip": skip, "skip_lr_scale": skip_lr_scale, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, NormSharding(parallel, partition), scaler)
        self._warn_of_rates()

    def check_group(self, group: dict[str, Any]) -> None:
        for name in ("trust_coefficient", "eps", "skip_lr_scale"):
            check_number(name, group[name], least=0)
        check_number("momentum", group["momentum"], least=0, below=1)
        for name in ("nesterov", "decay_in_ratio"):
            check_flag(name, group[name])
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("nesterov=True needs a momentum above 0")
        clamp = group["clamp"]
        if clamp is not None:
            if not isinstance(clamp, (tuple, list)) or len(clamp) != 2:
                raise ValueError(f"clamp={clamp!r} must be (lowest, highest) or None")
            for place in (0, 1):
                check_number(f"clamp[{place}]", clamp[place], least=0)
            if clamp[0] > clamp[1]:
                raise ValueError(f"clamp={clamp!r} must have the lower number first")
        check_choice("momentum_holds", group["momentum_holds"], ("update", "scaled_gradient"))

    def _warn_of_rates(self) -> None:
        """Warn if biases are about to get a learning rate that only models with norm layers tolerate."""
        steep = [g for g in self.param_groups if g["lr"] * g["skip_lr_scale"] > 1]
        skipped = [p.detach() for g in steep for p in g["params"] if g["skip"] == "1d" and p.dim() <= 1 and p.numel()]
        if not skipped or any(p.device.type == "meta" or bool((p > 0).all()) for p in skipped):
            return  # a norm's scale is positive: 1 at the start
        logger.warning(
            "thinwire: LARS skips biases, so they see the full learning rate %g, and the model seems to have no norm "
            "layers, without which that diverges: give skip_lr_scale=0.01",
            steep[0]["lr"],
        )

    def prepare(self, works: Sequence[GroupTensors]) -> list[Layers]:
        found = []
        for work in works:
            group, part = work.group, work.part(work.adapted)
            decay = group["weight_decay"] if group["decay_in_ratio"] else 0.0
            rule = Rule(group["trust_coefficient"], decay, group["eps"], group["clamp"])
            found.append(Layers(part.weights, part.gradients, rule))
        return found

    def update(self, work: GroupTensors, ratios: Tensor | None) -> None:
        group = work.group
        momentum, sign = group["momentum"], -1.0 if group["maximize"] else 1.0
        for indices, some, scale in ((work.adapted, ratios, 1.0), (work.skipped, None, group["skip_lr_scale"])):
            if not indices:
                continue
            part, rate = work.part(indices), float(group["lr"]) * scale
            gain, rate = (rate, 1.0) if group["momentum_holds"] == "update" else (1.0, rate)
            decay = 0.0 if some is None else group["weight_decay"]
            by = Advance(gain, sign, decay, momentum, group["nesterov"], rate)
            advance(part.weights, part.gradients, part.held("momentum_buffer") if momentum else [], some, by)
