"""Losses on targets sampled from the model's own output: on average, their gradients give the true Fisher."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DISTRIBUTIONS = ("categorical", "gaussian")


def sampled_loss(outputs: Tensor, distribution: str, generator: torch.Generator | None = None) -> Tensor:
    """Return the mean negative log-likelihood of targets sampled from the model (Martens and Grosse 2015, section 5).

    Args:
        outputs: "categorical": logits, classes last, ``[..., classes]``; the mean is over all other dimensions.
            "gaussian": means with unit variance, ``[B, ...]``; half the squared error, summed over each example, mean
            over examples.
        distribution: one of ``DISTRIBUTIONS``.
        generator: for the sampling; every rank needs its own, or the global one seeded differently on each rank.

    Raises:
        ValueError: the distribution is unknown.
    """
    if distribution == "categorical":
        logits = (
            outputs.reshape(-1, outputs.shape[-1]).float() if outputs.dtype.itemsize < 4 else outputs.flatten(0, -2)
        )
        probabilities = logits.detach().softmax(-1)
        targets = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
        return F.cross_entropy(logits, targets)
    if distribution == "gaussian":
        noise = torch.empty_like(outputs).normal_(generator=generator)
        return 0.5 * (outputs - (outputs.detach() + noise)).square().sum() / outputs.shape[0]
    raise ValueError(f"distribution={distribution!r} is unknown; use one of {', '.join(DISTRIBUTIONS)}")
