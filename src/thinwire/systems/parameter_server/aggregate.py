"""Sum a node's gradients per base version, so that one tensor on the wire still carries exact weights."""

from __future__ import annotations

from typing import Any

from thinwire.systems.parameter_server.messages import Row
from thinwire.systems.parameter_server.staleness import UNBOUNDED, alpha, norm


class Aggregator:
    """Gradients waiting to be pulled. Tensors are only added and scaled; without tensors, None stands for each.

    Args:
        alpha_rule, norm_rule: see :mod:`staleness`.
        deterministic: keep every gradient and add them in fp64, in order of (worker, step).
    """

    def __init__(self, alpha_rule: str, norm_rule: str, deterministic: bool = False) -> None:
        self._alpha, self._norm, self._deterministic = alpha_rule, norm_rule, deterministic
        self._rows: list[Row] = []
        self._sums: dict[int, Any] = {}
        self._each: list[tuple[Row, Any]] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def low(self) -> int:
        """The oldest base version."""
        return min((row.base for row in self._rows), default=UNBOUNDED)

    def add(self, row: Row, tensor: Any) -> None:
        """Add one gradient. The aggregator may change the tensor from now on."""
        self._rows.append(row)
        if self._deterministic:
            self._each.append((row, tensor))
        elif tensor is not None:
            held = self._sums.get(row.base)
            self._sums[row.base] = tensor if held is None else held.add_(tensor)

    def take(self, now: int) -> tuple[tuple[Row, ...], float, Any]:
        """Return the sum for an update of version ``now``, and empty the aggregator.

        Returns:
            The gradients in it; their share of the divisor (the sum of the norms); the sum of alpha times gradient, or
            None.
        """
        rows = tuple(sorted(self._rows, key=lambda row: (row.worker, row.step)))
        weight = float(sum(norm(self._norm, self._alpha, now - row.base) for row in rows))
        if self._deterministic:
            parts = [(row.base, tensor) for row, tensor in sorted(self._each, key=lambda e: (e[0].worker, e[0].step))]
            total = _total([(alpha(self._alpha, now - base), t) for base, t in parts if t is not None], wide=True)
        else:
            total = _total([(alpha(self._alpha, now - base), t) for base, t in sorted(self._sums.items())], wide=False)
        self._rows, self._sums, self._each = [], {}, []
        return rows, weight, total


def _total(parts: list[tuple[float, Any]], wide: bool) -> Any:
    """Return the sum of scaled tensors in order, in fp64 if ``wide``.

    A single tensor of scale 1 is returned as it is.
    """
    if not parts:
        return None
    scale, first = parts[0]
    total = first.double() if wide else first
    if scale != 1.0:
        total = total * scale
    for scale, tensor in parts[1:]:
        total = total.add_(tensor, alpha=scale) if not wide else total + tensor.double() * scale
    return total
