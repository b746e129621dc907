"""The two halves of a model: the front, which takes the data, and the back, which ends in the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from thinwire.systems.split.factors import Factors
from thinwire.systems.split.models import Parts, View, dense_bias
from thinwire.systems.split.models.base import inputs_of
from thinwire.systems.split.plan import SplitPlan


class Front(nn.Module):
    """Embeddings, the layers before the cut, and the first half of the layer that is cut.

    The published pseudo-code in one line: ``z = (attention_l(layers_1..l-1(embed(ids))) @ v.T) @ s.T``.
    """

    def __init__(
        self,
        view: View,
        plan: SplitPlan,
        embed: nn.Module,
        layers: Sequence[nn.Module],
        parts: Parts | None,
        f: Factors,
    ) -> None:
        super().__init__()
        self.view, self.plan = view, plan
        self.embeddings = embed
        self.layers = nn.ModuleList(layers)
        self.attend = parts.attend if parts else None
        self.before = parts.before if parts else None
        self.first = parts.first if parts and plan.kind == "ffn" else None
        lowrank = plan.kind == "lowrank"
        self.v = nn.Parameter(f.v) if lowrank else None
        self.s = nn.Parameter(f.s) if lowrank else None
        self.directions = nn.Parameter(f.directions) if plan.kept_directions else None

    def forward(self, inputs: Mapping[str, Tensor], lengths: Tensor | None = None) -> Tensor:
        """Return what crosses the cut: ``[B, L, width]``."""
        return self.compress(*self.activations(inputs, lengths))

    def activations(self, inputs: Mapping[str, Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the residual stream a ``[B, L, h]`` at the cut, and the input of the first dense layer."""
        hidden = self.embeddings(**inputs_of(inputs, *self.view.inputs))
        mask = self.view.mask(hidden, lengths)
        for layer in self.layers:
            hidden = self.view.run(layer, hidden, mask)
        if self.attend is None:
            return hidden, hidden
        a: Tensor = self.attend(hidden, mask)
        return a, (a if self.before is None else self.before(a))

    def compress(self, a: Tensor, x: Tensor) -> Tensor:
        """Turn the activations into what crosses the cut."""
        if self.plan.kind == "boundary":
            return a
        if self.first is not None:
            z: Tensor = self.first(x)
        else:
            z = (x @ self.v.T) @ self.s.T  # type: ignore[union-attr]
        if self.plan.residual == "keep":
            return torch.cat([z, a], dim=-1)
        if self.directions is not None:
            return torch.cat([z, a @ self.directions.T], dim=-1)
        return z


class Back(nn.Module):
    """The second half of the layer that is cut, the layers after it, and the head."""

    def __init__(
        self, view: View, plan: SplitPlan, layers: Sequence[nn.Module], parts: Parts | None, head: nn.Module, f: Factors
    ) -> None:
        super().__init__()
        self.view, self.plan = view, plan
        self.width = plan.width(view.hidden, view.intermediate)
        if parts and plan.kind == "lowrank":
            self.u = nn.Parameter(f.u)
            self.bias = nn.Parameter(dense_bias(parts.first).detach().clone())
        self.activation = parts.activation if parts else None
        self.second = parts.second if parts else None
        self.dropout = parts.dropout if parts else None
        self.after = parts.after if parts else None
        self.directions = nn.Parameter(f.directions.T.clone()) if plan.kept_directions else None
        self.layers = nn.ModuleList(layers)
        self.head = head

    def forward(self, z: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the logits from what crossed, ``[B, L, width]``."""
        hidden = z if self.second is None else self._second_half(z)
        mask = self.view.mask(hidden, lengths)
        for layer in self.layers:
            hidden = self.view.run(layer, hidden, mask)
        logits: Tensor = self.head(hidden, lengths)
        return logits

    def _second_half(self, z: Tensor) -> Tensor:
        extra = self.view.hidden if self.plan.residual == "keep" else self.plan.kept_directions
        main, rest = z.split([self.width - extra, extra], dim=-1)
        u = main if self.plan.kind == "ffn" else main @ self.u.T + self.bias
        y: Tensor = self.dropout(self.second(self.activation(u)))  # type: ignore[misc]
        if self.plan.residual == "keep":
            y = y + rest
        elif self.directions is not None:
            y = y + rest @ self.directions.T
        return y if self.after is None else self.after(y)


def by_role(front: Front, back: Back) -> dict[str, Front | Back]:
    """Return the halves under "edge" and "cloud", as their plan places them."""
    return {"edge": front, "cloud": back} if front.plan.front_on == "edge" else {"edge": back, "cloud": front}


def check_holder(half: Front | Back, role: str) -> None:
    """Raise ``ValueError`` if the plan gives this half to the other machine."""
    due = Front if half.plan.front_on == role else Back
    if not isinstance(half, due):
        raise ValueError(
            f"front_on={half.plan.front_on!r} gives the {role} the {due.__name__.lower()}: this is the "
            f"{type(half).__name__.lower()}"
        )
