from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.pricing.costs import Table
from thinwire.predict.measure.result import continued, fit_line, never_falling

SIZES = [4096 << n for n in range(13)]


@given(st.floats(0, 0.1), st.floats(1e-12, 1e-5))
def test_a_line_is_recovered(a, b):
    line = fit_line([(x, a + b * x) for x in SIZES])
    assert line.startup_seconds == pytest.approx(a, rel=1e-6, abs=1e-6 * b * SIZES[0])
    assert line.seconds_per_byte == pytest.approx(b, rel=1e-6)
    assert line.worst < 1e-6


def test_residuals_say_how_far_off():
    line = fit_line([(1, 1.0), (2, 2.0), (3, 6.0)])
    assert line.residuals == pytest.approx([(y - line(x)) / y for x, y in [(1, 1.0), (2, 2.0), (3, 6.0)]])
    assert line.worst == max(map(abs, line.residuals)) > 0.1


def test_neither_part_is_negative_and_something_is_needed():
    falling, below_0 = [(1, 2.0), (2, 1.0)], [(1, 0.1), (2, 3.0), (3, 6.5)]
    for points in (falling, below_0, [(5, 1.0)], [(1, 0.0), (2, 0.0)]):
        line = fit_line(points)
        assert min(line.startup_seconds, line.seconds_per_byte) >= 0
    with pytest.raises(ValueError, match="at least one point"):
        fit_line([])


def test_a_burst_among_small_messages_does_not_bend_the_rate():
    # What a token bucket does: small messages pass at once, the rest at the link's rate.
    line = fit_line([(x, 3e-4 + 8e-8 * max(0, x - 12_500)) for x in SIZES])
    assert line.seconds_per_byte == pytest.approx(8e-8, rel=0.03)


def test_a_kink_is_kept():
    # nccl#450: bus bandwidth falls above 32 MB.
    points = [(x, 1e-4 + x * 1e-9 + max(0, x - (1 << 20)) * 9e-9) for x in SIZES]
    assert never_falling(points) == tuple(points)
    table = Table(continued(never_falling(points)))
    assert all(table(x) == pytest.approx(y) for x, y in points)
    below = (table(1 << 20) - table(1 << 19)) / (1 << 19)
    above = (table(1 << 22) - table(1 << 21)) / (1 << 21)
    assert above / below == pytest.approx(10)
    assert fit_line(points).worst > 0.1


def test_points_that_fall_become_their_mean():
    assert never_falling([(1, 1.0), (3, 4.0), (2, 6.0), (4, 9.0)]) == ((1, 1.0), (2.5, 5.0), (4, 9.0))
    assert never_falling([(1, 3.0), (2, 2.0), (3, 1.0)]) == ((2, 2.0),)


@given(st.lists(st.tuples(st.integers(1, 10**8), st.floats(0, 10)), min_size=1, max_size=9, unique_by=lambda p: p[0]))
def test_never_falling_ascends(points):
    level = never_falling(points)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(level))
    assert Table(continued(level))(1e9) >= level[-1][1]


def test_beyond_the_last_point_the_slope_of_the_last_factor_of_four_goes_on():
    points = ((1.0, 1.0), (4.0, 4.0), (8.0, 9.0), (16.0, 10.0))  # the last two alone would say 1/8
    assert continued(points)[-1] == (64.0, 10.0 + 48 * 0.5)
    assert Table(continued(points))(128) == pytest.approx(10.0 + 112 * 0.5)
    assert continued(((7.0, 1.0),)) == ((7.0, 1.0),)
