"""The fusion tuner: finds the fastest of a few plans by measuring, not predicting. Seconds in, a choice out.

Source: the fusion tuner of DeAR (Zhang et al., arXiv 2302.12445), Bayesian optimisation of the fusion threshold.

Differences from the paper: the variable is log2 of the limit, and limits that give equal plans count once; the search
begins at the planner's optimum; seconds are normalised before the acquisition function sees them; start and challenger
are measured again alternately, and the challenger must win by more than the noise of these measurements.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from thinwire.core.program import Plan

Array = NDArray[np.float64]

DISTINCT = 8
"""Maximum number of plans measured."""
TIMES = 3
"""How many times the start and the challenger are measured."""
_OCTAVES, _PER_OCTAVE = 3, 2
_LENGTHS, _NOISES = (1.0, 2.0, 4.0), (1e-3, 1e-2, 0.1, 0.3)  # octaves; of the variance of log seconds
_XI = 0.01


def grid(start: float) -> list[float]:
    """Return fusion limits around a start, all in MiB: three octaves down and up in half octaves, without the start."""
    steps = range(-_OCTAVES * _PER_OCTAVE, _OCTAVES * _PER_OCTAVE + 1)
    return [start * 2.0 ** (k / _PER_OCTAVE) for k in steps if k]


def distinct(known: dict[float, Plan], limits: Sequence[float], make: Callable[[float], Plan]) -> dict[float, Plan]:
    """Return the known plans by limit, plus the plans of further limits that differ from all before them."""
    found = dict(known)
    seen = {plan.hash for plan in found.values()}
    for limit in limits:
        plan = make(limit)
        if plan.hash not in seen and limit not in found:
            seen.add(plan.hash)
            found[limit] = plan
    return found


class FusionTuner:
    """Asks for measurements of fusion limits and decides which limit to keep.

    First it measures the start and a distant limit on either side, then the limits with the greatest expected
    improvement under a Gaussian process of log seconds over log2 MiB (Matérn 5/2), ``DISTINCT`` in all. Then the start
    and the best other limit are measured again alternately, ``TIMES`` each in all; the spread of these repeats is the
    noise. The start is kept unless the gain exceeds twice the noise.

    Example:
        >>> tuner = FusionTuner([1.0, 2.0, 4.0], start=1.0)
        >>> while not tuner.done:
        ...     limit = tuner.ask()
        ...     tuner.tell(limit, 0.1 / limit)
        >>> tuner.best()
        4.0
    """

    def __init__(self, candidates: Sequence[float], start: float) -> None:
        self._limits = sorted(set(candidates))
        if not self._limits or not all(0 < limit < math.inf for limit in self._limits):
            raise ValueError(f"candidates={list(candidates)!r} must be limits in MiB, finite and above 0")
        if start not in self._limits:
            raise ValueError(f"start={start!r} is not one of the candidates")
        self.start = start
        self._told: dict[float, list[float]] = {}
        self._challenger: float | None = None

    def ask(self) -> float:
        if self.done:
            raise RuntimeError("the tuner is done; best() says what to keep")
        if self._challenger is None:
            return self._unexplored()
        pair = (self.start, self._challenger)
        return min(pair, key=lambda limit: len(self._told[limit]))  # if equal, the start

    def tell(self, limit: float, seconds: float) -> None:
        if limit not in self._limits:
            raise ValueError(f"limit={limit!r} is not one of the candidates")
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds={seconds!r} must be finite and above 0")
        self._told.setdefault(limit, []).append(math.log(seconds))
        if self._challenger is None and len(self._told) == min(DISTINCT, len(self._limits)):
            self._challenger = self._fastest()

    @property
    def done(self) -> bool:
        if self._challenger is None:
            return False
        # If the start is the fastest, there is nothing to compare it with.
        return self._challenger == self.start or len(self._told[self._challenger]) >= TIMES

    @property
    def tried(self) -> tuple[float, ...]:
        return tuple(self._told)

    @property
    def noise(self) -> float | None:
        """Standard deviation of one measurement as a fraction of it, over all repeats; None if nothing was repeated."""
        several = [seconds for seconds in self._told.values() if len(seconds) > 1]
        if not several:
            return None
        squares = sum(statistics.variance(seconds) * (len(seconds) - 1) for seconds in several)
        return math.sqrt(squares / sum(len(seconds) - 1 for seconds in several))

    @property
    def challenger(self) -> float | None:
        return self._challenger

    def seconds(self, limit: float) -> float:
        return math.exp(statistics.mean(self._told[limit]))

    def gain(self, limit: float) -> float:
        return 1 - self.seconds(limit) / self.seconds(self.start)

    def best(self) -> float:
        noise = self.noise
        if self._challenger is None or noise is None or not self.gain(self._challenger) > 2 * noise:
            return self.start
        return self._challenger

    # --- the search ------------------------------------------------------------------------------------------------

    def _unexplored(self) -> float:
        left = [limit for limit in self._limits if limit not in self._told]
        first = (self.start, self.start / 4, self.start * 4)
        if len(self._told) < len(first):
            if self.start not in self._told:
                return self.start
            return min(left, key=lambda limit: abs(math.log2(limit / first[len(self._told)])))
        mean, deviation, lowest = self._posterior(left)
        better = lowest - _XI - mean
        z = better / deviation
        density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in z])
        return left[int(np.argmax(better * below + deviation * density))]

    def _fastest(self) -> float:
        visited = [self.start, *(limit for limit in self._told if limit != self.start)]
        return visited[int(np.argmin(self._posterior(visited)[0]))]

    def _posterior(self, limits: Sequence[float]) -> tuple[Array, Array, float]:
        """Return mean and deviation of normalised log seconds at the limits, and the lowest mean at measured ones."""
        x = np.log2(np.array(list(self._told)))
        y = np.array([statistics.mean(seconds) for seconds in self._told.values()])
        y = (y - y.mean()) / max(float(y.std()), 1e-9)
        at = np.log2(np.array(limits))
        best: tuple[float, float, float] = (-math.inf, 0.0, 0.0)
        for length in _LENGTHS:
            for noise in _NOISES:
                best = max(best, (_likelihood(x, y, length, noise), length, noise))
        _, length, noise = best
        inverse = np.linalg.inv(_matern(x, x, length) + noise * np.eye(len(x)))
        across = _matern(at, x, length)
        variance = 1 - np.einsum("ij,jk,ik->i", across, inverse, across)
        lowest = float((_matern(x, x, length) @ inverse @ y).min())
        return across @ inverse @ y, np.sqrt(np.maximum(variance, 1e-12)), lowest


def _matern(a: Array, b: Array, length: float) -> Array:
    """Return the Matérn 5/2 covariance of unit variance: ``[n]``, ``[m]`` -> ``[n, m]``."""
    r = math.sqrt(5) * np.abs(a[:, None] - b[None, :]) / length
    covariance: Array = (1 + r + r**2 / 3) * np.exp(-r)
    return covariance


def _likelihood(x: Array, y: Array, length: float, noise: float) -> float:
    covariance = _matern(x, x, length) + noise * np.eye(len(x))
    return float(-y @ np.linalg.solve(covariance, y) / 2 - np.linalg.slogdet(covariance)[1] / 2)
