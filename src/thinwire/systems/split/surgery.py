"""Cut a model into two halves: factorised once, each parameter in exactly one half."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from thinwire.systems.split.factors import Factors, factorise, principal_directions
from thinwire.systems.split.halves import Back, Front
from thinwire.systems.split.models import View, dense_weight, view_of
from thinwire.systems.split.plan import SplitPlan

Sample = tuple[Mapping[str, Tensor], Tensor | None]
"""A front's inputs: tensors by name, and lengths [B] (None: no padding)."""


def split_model(model: nn.Module, plan: SplitPlan, samples: Iterable[Sample] | None = None) -> tuple[Front, Back]:
    """Cut a copy of a model.

    Args:
        model: of transformers, of a class with a view in ``split.models``; it is not changed.
        plan: where and how to cut.
        samples: batches of inputs, for ``init="activation"`` and ``residual="lowrank:q"``.

    Raises:
        ValueError: the model cannot be cut like this, or a parameter would belong to both halves.
    """
    view = view_of(model)
    plan.check(len(view.layers(model)), view.hidden)
    if not view.uses_lengths and "pack" in plan.up + plan.down:
        raise ValueError(f"a {view.model_type} has no padding: leave the codec pack out")
    _refuse_tied(model)
    model = copy.deepcopy(model)
    if plan.kind == "boundary":
        return assemble(view, model, plan, Factors.empty(0, 0, 0, 0))
    first = view.parts(view.layers(model)[plan.cut - 1]).first
    weight = dense_weight(first).detach()
    moment_a = moment_x = None
    if plan.calibrated:
        moment_a, moment_x = _moments(view, model, plan, samples)
    u, s, v = factorise(weight, plan.rank if plan.kind == "lowrank" else 1, moment_x if plan.init != "svd" else None)
    q = plan.kept_directions
    kept = weight.new_empty(0, view.hidden) if moment_a is None else principal_directions(moment_a, q).to(weight.dtype)
    return assemble(view, model, plan, Factors(u, s, v, kept))


def assemble(view: View, model: nn.Module, plan: SplitPlan, factors: Factors) -> tuple[Front, Back]:
    """Distribute the modules of a model over the two halves; the model must not be used afterwards."""
    layers = list(view.layers(model))
    parts = None if plan.kind == "boundary" else view.parts(layers[plan.cut - 1])
    own = plan.cut if parts is None else plan.cut - 1
    front = Front(view, plan, view.embeddings(model), layers[:own], parts, factors)
    back = Back(view, plan, layers[plan.cut :], parts, view.head(model), factors)
    return front, back


def _refuse_tied(model: nn.Module) -> None:
    """Raise ``ValueError`` if a parameter has two names: each side could train its own copy of it."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if names.setdefault(id(parameter), name) != name:
            raise ValueError(
                f"{names[id(parameter)]} and {name} are one parameter, which both halves would own: build the model "
                "with tie_word_embeddings=False"
            )


def _moments(view: View, model: nn.Module, plan: SplitPlan, samples: Iterable[Sample] | None) -> tuple[Tensor, Tensor]:
    """Return the means over real tokens of a^T a and x^T x, ``[h, h]`` fp64: of residual stream and dense input."""
    why = "init='activation'" if plan.init == "activation" else f"residual={plan.residual!r}"
    if samples is None:
        raise ValueError(f"{why} needs sample batches: pass samples=[(inputs, lengths), ...]")
    front, _ = assemble(view, copy.deepcopy(model), plan, Factors.empty(0, 0, 0, 0))
    front.eval()
    sums = [torch.zeros(view.hidden, view.hidden, dtype=torch.float64) for _ in range(2)]
    tokens = 0
    with torch.no_grad():
        for inputs, lengths in samples:
            found = front.activations(inputs, lengths)
            batch, length = found[0].shape[:2]
            real = torch.arange(length) < (torch.full((batch,), length) if lengths is None else lengths.cpu())[:, None]
            for total, value in zip(sums, found):
                rows = value[real.to(value.device)].double()
                total += (rows.T @ rows).cpu()
            tokens += int(real.sum())
    if not tokens:
        raise ValueError(f"{why} needs sample batches: samples is empty")
    return sums[0] / tokens, sums[1] / tokens
