"""How often workers that train apart should exchange."""

from __future__ import annotations

import math

LONGEST = 16
"""Steps of a period that a training from scratch bears; a longer one costs more steps than it saves waiting."""

WAITING = 0.05
"""Of a step: what an exchange that is waited for may add to it on average."""


def period_of(step_seconds: float, round_seconds: float, *, overlapped: bool, most: int = LONGEST) -> int:
    """The smallest number of steps between two exchanges at which they cost next to no time.

    Args:
        step_seconds: of a step that exchanges nothing.
        round_seconds: of an exchange of the whole model.
        overlapped: it runs while training goes on, and must be back before the next: then it is hidden. Else it is
            waited for, and may add a twentieth to the mean step.
        most: the answer, at most.

    Example:
        >>> period_of(0.3, 0.7, overlapped=True), period_of(0.3, 0.07, overlapped=False)
        (4, 5)
    """
    if step_seconds <= 0:
        return most
    steps = (
        1 + math.ceil(round_seconds / step_seconds)
        if overlapped
        else math.ceil(round_seconds / (WAITING * step_seconds))
    )
    return max(2, min(most, steps))
