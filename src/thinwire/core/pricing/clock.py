"""The timeline used by all merge rules: one compute clock and one link, first come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.pricing.checks import Price, check_groups, check_seconds, check_sizes, priced


def finish(
    groups: Sequence[Sequence[int]],
    sizes: Sequence[int],
    backward_seconds: Sequence[float],
    exchange_seconds: Price,
    select_seconds: Price | None = None,
    *,
    side_stream: bool = False,
) -> float:
    """Return when the last message has arrived, counted from the start of backward.

    Scatter and zero-fill after the exchange are the same for every grouping and are left out.

    Args:
        groups: consecutive indices, in backward order, each index once.
        sizes: elements per tensor, in backward order.
        backward_seconds: backward time of each tensor, from the previous gradient to this one.
        exchange_seconds: exchange time of a group, as a function of its elements.
        select_seconds: selection time of a group, as a function of its elements; None if nothing is selected (dense).
        side_stream: the selection runs alongside backward and does not delay it. Has no effect if dense.

    Returns:
        Seconds; 0 for no tensors. The exposed time is what exceeds ``sum(backward_seconds)``.

    Raises:
        ValueError: invalid groups, sizes or times, or a callable that returns an invalid time.

    Example:
        >>> finish([[0], [1, 2]], [4, 1, 1], [1.0, 1.0, 1.0], lambda d: 0.5 + d)
        8.0
    """
    sizes = check_sizes(sizes)
    seconds = check_seconds(backward_seconds, len(sizes))
    check_groups(groups, len(sizes))
    compute = selected = link = 0.0
    for group in groups:
        size = sum(sizes[i] for i in group)
        for i in group:
            compute += seconds[i]
        ready = compute
        if select_seconds is not None:
            work = priced("select_seconds", select_seconds, size)
            if side_stream:
                ready = selected = max(selected, compute) + work
            else:
                ready = compute = compute + work
        link = max(link, ready) + priced("exchange_seconds", exchange_seconds, size)
    return link
