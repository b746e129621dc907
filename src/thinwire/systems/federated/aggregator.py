"""The server's side of an algorithm: what it requests from the cohort, and how the answers are combined.

A round is a generator, like every method of thinwire: it yields a :class:`RoundRequest` and receives its
:class:`Reduced`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Operator:
    """How the values that clients return under one name are combined.

    Attributes:
        name: for messages.
        linear: whether a sum of sums gives the same as one sum, so that each device may send a single tensor.
        summed: whether it is computed from such sums; False: every client's value is sent to the server.
    """

    name: str
    linear: bool = True
    summed: bool = True


WEIGHTED_MEAN = Operator("weighted mean")
"""Mean over the clients that answered, weighted by their samples (or equally, see the algorithm's ``weights``)."""
SUM = Operator("sum")
"""Sum over the clients that answered."""
COLLECT = Operator("collect", summed=False)
"""Every client's value, by client id.

It sends one value per client, so it is for small values, and for rules such as the median that need all values.
"""


class NotLinear(ValueError):
    """A rule that is not linear was requested for summed values."""


def check_operators(operators: Mapping[str, Operator]) -> None:
    """Refuse operators that cannot be computed.

    Raises:
        NotLinear: a summed name has an operator that is not linear.
        ValueError: an object is not an operator.
    """
    for name, operator in operators.items():
        if not isinstance(operator, Operator):
            raise ValueError(f"operators[{name!r}] must be WEIGHTED_MEAN, SUM or COLLECT, not {operator!r}")
        if operator.summed and not operator.linear:
            raise NotLinear(
                f"{name!r}: a {operator.name} cannot be made of sums that devices have already added up; use COLLECT, "
                "which sends every client's value, and compute it in program()"
            )


@dataclass(frozen=True)
class RoundRequest:
    """One pass over the cohort: every client gets the payload and answers once.

    Attributes:
        payload: tensors by name, the same for all clients. Not modified.
        name: of the pass, if an algorithm has several.
    """

    payload: Mapping[str, Tensor]
    name: str = "train"


@dataclass(frozen=True)
class Reduced(Mapping[str, Tensor]):
    """The combined answers of a cohort: a mapping from names to tensors.

    Attributes:
        tensors: by name, the summed ones.
        collected: by client, then by name, the others.
        samples, clients: totals over the clients that answered.
        failed: client -> reason why it did not answer.
        metrics: means over the clients that answered, weighted by samples.
    """

    tensors: Mapping[str, Tensor]
    collected: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    samples: int = 0
    clients: int = 0
    failed: Mapping[int, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


RoundProgram = Generator[RoundRequest, Reduced, None]


class ServerAggregator(Protocol):
    """The part of an algorithm that runs on the server."""

    operators: Mapping[str, Operator]
    weights: str

    def select(self, round: int, population: int, clients_per_round: int, seed: int) -> Sequence[int]:
        """Return the clients of a round: ascending, each once."""

    def program(self, round: int) -> RoundProgram:
        """Run one round: yield visits, receive their results, change the server's state."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the server's state."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state_dict``."""


def facts(algorithm: Any) -> dict[str, Any]:
    """Return an algorithm's name and options as plain data: compared across ranks, saved in checkpoints."""
    plain = (int, float, str, bool, type(None))
    names = [f.name for f in dataclasses.fields(algorithm)] if dataclasses.is_dataclass(algorithm) else vars(algorithm)
    options: dict[str, Any] = {name: getattr(algorithm, name) for name in names}
    options = {name: value for name, value in options.items() if isinstance(value, plain)}
    if inner := getattr(algorithm, "inner", None):
        options["inner"] = facts(inner)
    return {"algorithm": type(algorithm).__name__, **options}
