"""DP-SGD on a client: per-sample clipping, noise on the sum, Poisson-sampled batches; and its privacy cost.

Abadi et al. 2016, with Opacus' per-sample gradients and its accountant. It shows what privacy costs in accuracy, and
gives none: the noise is a function of the run's seed, and the training loss is reported. So a deployment refuses it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thinwire.core.kernels.seeding import generator
from thinwire.systems.federated.aggregator import ClientContext
from thinwire.systems.federated.data import ClientData, chosen_samples, size_of


def private_gradients(algorithm: Any, context: ClientContext) -> Iterator[Tensor]:
    """Yield the gradients ``[D]`` of a client's local steps, each in memory that the next one overwrites."""
    size = size_of(context.data)
    rate, steps = _rate_and_steps(algorithm, size)
    draw = generator(context.seed, "privacy")
    parameters = dict(context.model.named_parameters())
    trained = [parameters[name] for name in context.workspace.names]
    limit = algorithm.max_grad_norm
    hooks = opacus().grad_sample.GradSampleHooks(context.model, loss_reduction="mean")
    try:
        for _ in range(steps):
            taken = torch.nonzero(torch.rand(size, generator=draw) < rate).squeeze(1)
            total = torch.zeros_like(context.x)
            if len(taken):
                # the first layer's inputs need no gradient, and its hook warns about that
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Full backward hook is firing")
                    context.gradient(chosen_samples(context.data, taken))
                with torch.no_grad():
                    each = torch.cat([p.grad_sample.flatten(1) for p in trained], 1)  # type: ignore[attr-defined]
                    norms = torch.linalg.vector_norm(each, dim=1)
                    total = (limit / (norms + 1e-6)).clamp(max=1.0) @ each
                for p in trained:
                    p.grad_sample = None  # type: ignore[attr-defined]
            noise = torch.randn(total.shape, generator=draw, dtype=total.dtype).to(total.device)
            yield total.add_(noise, alpha=algorithm.noise_multiplier * limit).div_(rate * size)
    finally:
        hooks.remove_hooks()


def epsilons(
    algorithm: Any, clients: ClientData, *, rounds: int, clients_per_round: int, seed: int, delta: float = 1e-5
) -> dict[int, float]:
    """Return the privacy cost of each client that has taken part: epsilon by client at ``delta``, after some rounds."""

    @cache
    def cost(size: int, visits: int) -> float:
        rate, steps = _rate_and_steps(algorithm, size)
        accountant = opacus().accountants.RDPAccountant()
        accountant.history = [(algorithm.noise_multiplier, rate, steps * visits)]
        return float(accountant.get_epsilon(delta))

    cohorts = (algorithm.select(round, len(clients), clients_per_round, seed) for round in range(rounds))
    times = Counter(client for cohort in cohorts for client in cohort)
    return {client: cost(clients.samples(client), visits) for client, visits in sorted(times.items())}


def _rate_and_steps(algorithm: Any, size: int) -> tuple[float, int]:
    """Return a sample's probability to be in a batch, and how many batches a client trains on in a round."""
    batch = min(algorithm.batch_size or size, size)
    steps = algorithm.epochs * -(-size // batch)
    return batch / size, min(steps, algorithm.max_steps or steps)


def opacus() -> Any:
    try:
        import opacus.accountants
        import opacus.grad_sample
    except ImportError as error:
        raise ValueError("noise_multiplier= needs Opacus: pip install 'thinwire[privacy]'") from error
    return opacus
