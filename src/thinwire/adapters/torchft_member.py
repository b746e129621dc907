"""What a replica is to the others under torchft, whatever they exchange: what it remembers, and whose steps count.

Who gives a step up is certain that it counts for nobody, or will hear: a replica votes when it has had everything, and
steps when it has all votes. A vote that nobody receives leaves its sender with a step that the others make again
without it. So members of a new quorum compare which step counted last, and in which quorum; the later quorum is right.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire.adapters.torchft_manager import Quorum, Quorums, enter, leave, told
from thinwire.engine.stats import Stats
from thinwire.local.rounds import Rounds
from thinwire.program import Plan

logger = logging.getLogger("thinwire")

_RUNS = 100
_Handle = TypeVar("_Handle", bound="QuorumHandle")
Attempt = tuple[int, int]
"""The manager's step and the quorum of an exchange."""


@dataclass
class QuorumMemory:
    """What goes from one quorum to the next, as it was after the last step that counted.

    Attributes:
        own: residuals, their offsets and local fields, of this replica alone.
        shared: fields that are equal on all replicas.
        outer: of local steps, likewise.
        step, dropped: counters of the method's state, equal on all.
        plan: in force; None: none was made of several replicas.
        commit: the manager's step and the quorum of the last exchange that counted; None: there was none.
        runs: first step and quorum of the steps that counted, one run for each quorum, the last hundred.
    """

    own: dict[str, Any] = field(default_factory=lambda: {"residual": {}, "offset": {}, "local": {}})
    shared: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    dropped: int = 0
    plan: Plan | None = None
    commit: Attempt | None = None
    runs: list[Attempt] = field(default_factory=list)

    def keep(self, snapshot: Mapping[str, Any]) -> None:
        """Of a method's state. Its counters may be those of a step that does not count."""
        self.own = {kind: snapshot[kind] for kind in ("residual", "offset", "local")}
        self.shared = snapshot["shared"]

    def keep_rounds(self, rounds: Rounds) -> None:
        """Of local steps, in one fragment, with nothing under way."""
        clock = rounds.snapshot()
        [fragment] = clock.pop("fragments")
        codec = fragment.pop("codec")
        self.keep(codec)
        self.step, self.dropped = codec["step"], codec["dropped"]
        self.outer = {"clock": clock, "fragment": fragment}

    def restore_rounds(self, rounds: Rounds) -> None:
        """Into other ones of the same settings."""
        rounds.restore({**self.outer["clock"], "fragments": [{**self.outer["fragment"], "codec": self.state()}]})

    def state(self) -> dict[str, Any]:
        """What a method's state restores."""
        return {**self.own, "shared": self.shared, "step": self.step, "dropped": self.dropped}

    def counts(self, attempt: Attempt) -> None:
        """An exchange has counted."""
        if not self.runs or self.runs[-1][1] != attempt[1]:
            self.runs = [*self.runs[-_RUNS:], attempt]
        self.commit = attempt

    def counted(self, attempt: Attempt) -> bool:
        """Whether an exchange has."""
        step, quorum = attempt
        run = [number for first, number in self.runs if first <= step][-1:]
        return self.commit is not None and step <= self.commit[0] and run == [quorum]

    def shared_part(self) -> dict[str, Any]:
        """What is equal on all replicas, as plain values and tensors."""
        return {
            "shared": self.shared,
            "outer": self.outer,
            "step": self.step,
            "dropped": self.dropped,
            "plan": self.plan.to_json() if self.plan else None,
            "commit": self.commit,
            "runs": self.runs,
        }

    @classmethod
    def of_shared_part(cls, saved: Mapping[str, Any]) -> QuorumMemory:
        """Of another replica; nothing is owed."""
        made = cls(**{name: saved[name] for name in ("shared", "outer", "step", "dropped", "commit", "runs")})
        made.plan = Plan.from_json(saved["plan"]) if saved["plan"] else None
        return made


@dataclass
class Losses:
    """What was owed and will not be paid.

    Attributes:
        identity: of this process, as the others know it.
        members: of the last quorum.
        gone: who was a member and is none.
        norm: of what this process has had to forget.
    """

    identity: int = field(default_factory=lambda: secrets.randbits(62))
    members: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    norm: float = 0.0

    def meet(self, members: set[int]) -> None:
        """Another quorum."""
        self.gone = (self.gone | self.members) - members
        self.members = members

    def forget(self, residuals: Mapping[str, Tensor]) -> None:
        """This process' own."""
        self.norm += sum(float(x.norm()) ** 2 for x in residuals.values()) ** 0.5


class QuorumMember:
    """One replica.

    Attributes:
        model, optimizers: its own.
        quorums: of its manager.
        memory: of what it exchanges.
        losses: what was lost of it.
        met: the quorum whose members it has met last; None: there was none yet.
        attempt: the exchange under way.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], quorums: Quorums) -> None:
        self.model, self.optimizers, self.quorums = model, list(optimizers), quorums
        self.memory, self.losses = QuorumMemory(), Losses()
        self.met: Quorum | None = None
        self.attempt: Attempt | None = None

    def begins(self, quorum: Quorum) -> None:
        """An exchange begins."""
        self.attempt = (self.quorums.manager.current_step(), quorum.number)

    def meet(self, quorum: Quorum) -> None:
        """Make a process group with the members of a quorum, of whom all have kept the same step last.

        Raises:
            RuntimeError: one has not come, or has kept another step, which it will learn with the next quorum.
        """
        self.met = quorum
        if quorum.size > 1:
            enter(quorum, self.quorums.timeout)
        step, number = self.memory.commit or (-1, -1)
        mine = (step, number, self.losses.identity)
        everyone = [mine] if quorum.size == 1 else told(list(mine))
        self.losses.meet({row[2] for row in everyone})
        latest = max(row[:2] for row in everyone)
        if latest != mine[:2]:
            self.quorums.fall_behind()
        if any(row[:2] != latest for row in everyone):
            raise RuntimeError(
                "a replica has kept a step that the others have made again without it: it will be healed"
            )

    def failed(self, error: Exception) -> None:
        """The exchange has failed, so the step does not count. The others must learn of it at once."""
        logger.warning("thinwire: the step does not count: %s", error)
        self.quorums.manager.report_error(error)
        leave()

    def give(self) -> dict[str, Any]:
        """What the manager hands to who comes; ``memory`` must be up to date."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            **self.memory.shared_part(),
        }

    def take(self, saved: Mapping[str, Any]) -> None:
        """Take it over: this replica has come, or has fallen behind. What it owes is kept, if its last step counts."""
        theirs, memory = QuorumMemory.of_shared_part(saved), self.memory
        if memory.commit is not None and not theirs.counted(memory.commit):
            self.losses.forget(memory.own["residual"])
        else:
            theirs.own = memory.own
        self.model.load_state_dict(saved["model"])
        for optimizer, one in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(one)
        self.memory = theirs

    def counted_without(self, saved: Mapping[str, Any]) -> bool:
        """Whether the exchange that was under way last has counted for the others."""
        return self.attempt is not None and QuorumMemory.of_shared_part(saved).counted(self.attempt)

    def told_of(self, stats: Stats, *, residual: bool) -> Stats:
        """Stats with what was lost; ``residual``: whether the method owes anything."""
        lost = None if self.losses.gone and residual else self.losses.norm
        return dataclasses.replace(stats, lost_residual_norm=lost)


class QuorumHandle(ABC):
    """What ``attach`` returns: hooks in model and optimizers, and what they call, until ``close``."""

    def __init__(self, member: QuorumMember) -> None:
        self._member = member
        self._handles: list[Any] = [o.register_step_post_hook(self._stepped) for o in member.optimizers]
        for module in member.model.modules():
            if module is member.model or any(True for _ in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(self._enter))
        member.quorums.manager.register_state_dict_fn("thinwire", self._take, self._give)

    @abstractmethod
    def _enter(self, module: nn.Module, args: Any) -> None:
        """A forward begins."""

    @abstractmethod
    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped."""

    @abstractmethod
    def _give(self) -> dict[str, Any]:
        """What the manager hands to who comes."""

    @abstractmethod
    def _take(self, saved: dict[str, Any]) -> None:
        """This replica has come, or has fallen behind."""

    @abstractmethod
    def _leave(self) -> None:
        """Keep what counts, and give the communicator back."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the model's gradients by their global norm. Returns the norm."""
        parameters = self._member.model.parameters()
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    @property
    def quorum(self) -> Quorum | None:
        """The one whose members exchange; None: there was none yet."""
        return self._member.met

    def close(self) -> None:
        """Take the hooks out and give the communicator back. Idempotent; the manager is the caller's to shut down."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leave()

    def __enter__(self: _Handle) -> _Handle:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def added(past: Stats, now: Stats) -> Stats:
    """Counters over all quorums."""
    names = ("rejected_steps", "dropped_steps", "bytes_sent", "dense_bytes", "exposed_seconds")
    return dataclasses.replace(now, **{name: getattr(past, name) + getattr(now, name) for name in names})
