"""What users choose of local steps: how often, in what code, and what is made of the mean change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from thinwire.methods.base import check_count
from thinwire.methods.cast import Cast
from thinwire.methods.registry import resolve
from thinwire.program import Method


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Nesterov:
    """The outer optimizer of DiLoCo: SGD with Nesterov momentum on the mean change of a round.

    Paper: Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105.

    A change that points the same way round after round is multiplied by ``lr / (1 - momentum)`` in the end, 7 with the
    published values: a larger step than the inner optimizer's rate says. So short runs want a smaller momentum, or a
    ramp.

    Args:
        lr: times the mean change.
        momentum: of changes.
        ramp_rounds: rounds of a fragment over which the momentum grows from 0 to its value; 0: it has it at once.
    """

    lr: float = 0.7
    momentum: float = 0.9
    ramp_rounds: int = 0

    def __post_init__(self) -> None:
        if not _is_number(self.lr) or not self.lr > 0:
            raise ValueError(f"Nesterov: lr={self.lr!r} must be above 0")
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(f"Nesterov: momentum={self.momentum!r} must be at least 0 and below 1")
        check_count("Nesterov: ramp_rounds", self.ramp_rounds)

    def momentum_at(self, round_: int) -> float:
        """In the round of this number, from 0."""
        return self.momentum * min(1.0, round_ / self.ramp_rounds) if self.ramp_rounds else self.momentum


@dataclass(frozen=True)
class Local:
    """Local steps: every rank trains by itself, and all average their weights, or their changes, now and then.

    Args:
        sync_every: H, optimizer steps between two exchanges of a parameter.
        codec: the method that carries the mean change, with its residual; None: weights are averaged as they are.
            ``attach`` takes "int8", "int4", "int2", "bf16", "fp16" or a method's name too.
        outer: what is made of the mean change; None: it is applied.
        fragments: parts of the model that are exchanged at different steps, each once in ``sync_every``, so that less
            is sent at a time (Streaming DiLoCo, arXiv 2501.18512).
        fragment_sync_delay: optimizer steps that go on while a fragment travels. 0: the exchange is waited for.
        fragment_update_alpha: share of its own weights that a rank keeps when a fragment comes back: 0 takes the outer
            weights, which throws away the steps made meanwhile. None: the outer weights, and those steps on top.

    Raises:
        ValueError: an option out of its range.
    """

    sync_every: int = 8
    codec: Method | None = None
    outer: Nesterov | None = None
    fragments: int = 1
    fragment_sync_delay: int = 0
    fragment_update_alpha: float | None = None

    def __post_init__(self) -> None:
        check_count("sync_every", self.sync_every, least=1)
        check_count("fragments", self.fragments, least=1)
        check_count("fragment_sync_delay", self.fragment_sync_delay)
        if self.fragment_sync_delay >= self.sync_every:
            raise ValueError(
                f"fragment_sync_delay={self.fragment_sync_delay} must be below sync_every={self.sync_every}: a "
                "fragment must be back before it is sent again"
            )
        alpha = self.fragment_update_alpha
        if alpha is not None and not (_is_number(alpha) and 0 <= alpha <= 1):
            raise ValueError(f"fragment_update_alpha={alpha!r} must be None or from 0 to 1")
        if self.codec is not None and not isinstance(self.codec, Method):
            raise ValueError(f"codec={self.codec!r} must be a method, for example thinwire.ACP(rank=16), or None")
        if self.codec is not None and "local" in self.codec.unfit:
            raise ValueError(f"{self.codec.name} cannot be a codec of local steps: {self.codec.unfit['local']}")
        if self.codec is not None and self.codec.decoupled:
            raise ValueError(f"{self.codec.name} is decoupled, which belongs to gradients: leave decoupled=True out")

    @property
    def averages(self) -> bool:
        """Whether weights themselves are averaged: the mean change, applied as it is, without its rounding."""
        return self.codec is None and self.outer is None

    def leaves(self, count: int, fragment: int) -> bool:
        """Whether a fragment is sent after the optimizer step of this number, from 1."""
        return count % self.sync_every == (fragment + 1) * self.sync_every // self.fragments % self.sync_every


_DTYPES = ("fp16", "bf16", "int8", "int4", "int2")
PRESETS: Mapping[str, Mapping[str, Any]] = {"local": {}, "diloco": {"sync_every": 64, "outer": Nesterov()}}


def local_settings(method: Local | str, options: Mapping[str, Any]) -> Local:
    """The settings that a preset's name and its options stand for, or Local(...) itself.

    Raises:
        ValueError: an unknown option or codec, or one out of its range.
    """
    if isinstance(method, Local):
        if options:
            raise ValueError(f"Local(...) carries its own options: write {', '.join(options)} into it")
        return method
    name = method.lower()
    known = [field.name for field in fields(Local)]
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"{name} has no option {unknown[0]!r}; it has {', '.join(known)}")
    chosen = {**PRESETS[name], **options}
    if isinstance(codec := chosen.get("codec"), str):
        chosen["codec"] = Cast(codec) if codec in _DTYPES else resolve(codec)
    return Local(**chosen)
