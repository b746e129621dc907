"""The server of a run, without I/O: it says which visit comes next, and receives its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.systems.federated.aggregator import WEIGHTED_MEAN, Reduced, RoundProgram, RoundRequest, check_operators
from thinwire.systems.federated.device import BUFFERS, RoundTask, Sums
from thinwire.systems.federated.workspace import buffers_of_sum

_EVALUATIONS = 20  # in a run, if the user does not say how many


class AllClientsFailed(RuntimeError):
    """All clients of a cohort failed."""


class FederatedServer:
    """Drives an algorithm round by round; the same for every back end and for a deployment.

    ``request`` is the next visit, with the model's floating-point buffers in its payload; None between rounds.
    """

    def __init__(self, algorithm: Any, buffers: Tensor, sizes: Sequence[int]) -> None:
        check_operators(algorithm.operators)
        if BUFFERS in algorithm.operators:
            raise ValueError(f"{BUFFERS!r} is the name of the model's own buffers: call the operator something else")
        self.algorithm, self.buffers, self.sizes = algorithm, buffers, sizes
        self.request: RoundRequest | None = None
        self._program: RoundProgram | None = None
        self._new_buffers = buffers

    def cohort(self, round: int, population: int, clients_per_round: int, seed: int) -> list[int]:
        chosen = [int(client) for client in self.algorithm.select(round, population, clients_per_round, seed)]
        if not chosen or len(set(chosen)) != len(chosen):
            raise ValueError("select() must name at least one client, and each only once")
        if min(chosen) < 0 or max(chosen) >= population:
            raise ValueError(f"select() names clients outside 0..{population - 1}")
        return chosen

    def begin(self, round: int) -> None:
        self._program = self.algorithm.program(round)
        self._new_buffers = self.buffers
        with torch.no_grad():
            self._set(next(self._program, None))

    def deliver(self, reduced: Reduced) -> None:
        """Take the result of ``request``; afterwards ``request`` is the next visit, or None if the round is over."""
        assert self._program is not None
        if BUFFERS in reduced:
            self._new_buffers = buffers_of_sum(reduced[BUFFERS], self.sizes, self.buffers)
        with torch.no_grad():
            try:
                self._set(self._program.send(reduced))
            except StopIteration:
                self.request, self.buffers = None, self._new_buffers

    def _set(self, request: RoundRequest | None) -> None:
        self.request = request and RoundRequest({**request.payload, BUFFERS: self.buffers}, request.name)

    def state(self) -> dict[str, Tensor]:
        return {**{f"algorithm/{name}": x for name, x in self.algorithm.state_dict().items()}, BUFFERS: self.buffers}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        found = {name: x.to(self.buffers.device) for name, x in state.items()}
        self.buffers = found.pop(BUFFERS)
        self.algorithm.load_state_dict({name.removeprefix("algorithm/"): x for name, x in found.items()})


def reduce(sums: Sums, task: RoundTask, algorithm: Any, dtype: torch.dtype) -> Reduced:
    """Turn sums into what the algorithm requested; means are over the clients that answered."""
    if sums.clients == 0:
        client, why = next(iter(sorted(sums.failed.items())))
        raise AllClientsFailed(
            f"all {task.total_clients} clients of round {task.round} failed; client {client}, for one: {why}"
        )
    if algorithm.weights == "uniform":
        whole, part = task.total_clients, sums.clients
    else:
        whole, part = task.total_samples, sums.samples
    factor = 1.0 if whole == part else whole / part
    operators = {**algorithm.operators, BUFFERS: WEIGHTED_MEAN}
    values = {
        name: sums.sums.result(name, factor if operators[name] is WEIGHTED_MEAN else 1.0, dtype)
        for name in sums.sums.sums
    }
    return Reduced(
        tensors=values,
        collected=dict(sorted(sums.collected.items())),
        samples=sums.samples,
        clients=sums.clients,
        failed=dict(sorted(sums.failed.items())),
        metrics={name: value / sums.samples for name, value in sorted(sums.metrics.items())},
    )


def evaluation_due(round: int, rounds: int, every: int | None) -> bool:
    """Return whether an evaluation is due after a round (-1: before the first); ``every`` as for ``simulate``."""
    if round == rounds - 1:
        return True
    if every is None:
        every = -(-rounds // _EVALUATIONS)
    return every > 0 and (round + 1) % every == 0
