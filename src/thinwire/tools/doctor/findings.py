"""A finding: one sentence on what is wrong, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.predict.measure.facts import Facts, Interface
from thinwire.predict.measure.network import Choice

ERROR, WARNING, NOTE = "error", "warning", "note"
"""Training cannot start or work; it works worse than it could, or fails on several machines; good to know."""


@dataclass(frozen=True)
class Finding:
    """Something found.

    Attributes:
        level: "error": it prevents training; "warning"; "note".
        code: its name in docs/doctor.md.
        what: one sentence.
        remedy: what to do.
    """

    level: str
    code: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Setting:
    """The input of the checks: the facts, what the backends will use, and the number of machines.

    ``nodes``: machines of the job; None: unknown, so that problems on several machines are only warnings.
    """

    facts: Facts
    gloo: Choice
    nccl: Choice | None
    nodes: int | None

    @property
    def several(self) -> bool:
        """Whether the job is known to run on several machines."""
        return (self.nodes or 1) > 1

    @property
    def choices(self) -> list[Choice]:
        """Choices of the backends that this machine can use."""
        return [choice for choice in (self.gloo, self.nccl) if choice is not None]

    @property
    def interface(self) -> Interface | None:
        """The interface that carries the gradients: NCCL's if there are GPUs for it, else Gloo's."""
        names = (self.nccl or self.gloo).interfaces
        return self.facts.interface(names[0]) if names else None

    def on_several(self) -> str:
        """Level of findings that matter only on several machines."""
        return ERROR if self.several else WARNING
