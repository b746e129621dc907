"""The server's side of an algorithm: what it asks the cohort for, and how the answers become one.

A round is a generator, as every method of thinwire is: it yields a :class:`RoundRequest` and receives its
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
    """How the values that the clients return under one name are brought together.

    Attributes:
        name: for messages to people.
        linear: whether sums of sums give the same as one sum, so that each device may send a single tensor.
        summed: whether it is computed from such sums; False: every client's value travels to the server.
    """

    name: str
    linear: bool = True
    summed: bool = True


WEIGHTED_MEAN = Operator("weighted mean")
"""Mean over the clients that answered, weighted by their samples (or equally, as the algorithm's ``weights`` says)."""
SUM = Operator("sum")
"""Sum over the clients that answered."""
COLLECT = Operator("collect", summed=False)
"""Every client's value, under its id. It costs as many values as clients: for small things, and for rules such as the
median that no sum can give."""


class NotLinear(ValueError):
    """A rule that sums cannot express was asked of summed values."""


def check_operators(operators: Mapping[str, Operator]) -> None:
    """Refuse what cannot be reduced.

    Raises:
        NotLinear: a rule that is not linear on a summed name.
        ValueError: something that is no operator.
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
        payload: tensors by name; all clients see the same. Not edited.
        name: what the pass is for, where an algorithm has several.
    """

    payload: Mapping[str, Tensor]
    name: str = "train"


@dataclass(frozen=True)
class Reduced(Mapping[str, Tensor]):
    """What a cohort has answered, brought together: a mapping from names to tensors.

    Attributes:
        tensors: by name, those that are summed.
        collected: by client, then by name, those that are not.
        samples, clients: of the clients that answered.
        failed: client -> why it did not.
        metrics: means over the clients that answered, by samples.
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
    """What runs on the server."""

    operators: Mapping[str, Operator]
    weights: str

    def select(self, round: int, population: int, clients_per_round: int, seed: int) -> Sequence[int]:
        """The clients of a round: ascending, each once."""

    def program(self, round: int) -> RoundProgram:
        """One round: yields visits, receives what they gave, changes the server's state."""

    def state_dict(self) -> dict[str, Tensor]:
        """The server's state."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a ``state_dict``."""


def facts(algorithm: Any) -> dict[str, Any]:
    """An algorithm's name and options as plain data: compared over ranks, kept in checkpoints."""
    plain = (int, float, str, bool, type(None))
    names = [f.name for f in dataclasses.fields(algorithm)] if dataclasses.is_dataclass(algorithm) else vars(algorithm)
    options: dict[str, Any] = {name: getattr(algorithm, name) for name in names}
    options = {name: value for name, value in options.items() if isinstance(value, plain)}
    if inner := getattr(algorithm, "inner", None):
        options["inner"] = facts(inner)
    return {"algorithm": type(algorithm).__name__, **options}
