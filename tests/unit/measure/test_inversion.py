import itertools

import pytest
import torch

from thinwire.predict.measure.kernels import curve, inversion_points, sides

CPU = torch.device("cpu")


def test_sides_cover_the_largest():
    assert sides(1) == sides(64) == [64]
    assert sides(65) == [64, 128]
    assert sides(4608) == [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    with pytest.raises(ValueError, match="largest=0"):
        sides(0)


@pytest.mark.parametrize("kind", ["inverse", "eigen"])
def test_every_side_has_a_time(kind):
    seen = []
    points = inversion_points(kind, CPU, largest=200, seconds=0.3, on_point=seen.append)
    assert [d for d, _ in points] == [64, 128, 256]
    assert all(seconds > 0 for _, seconds in points)
    assert seen[0] == 64


def test_what_does_not_fit_is_eight_times_the_one_before():
    ticks = itertools.count()
    points = inversion_points("inverse", CPU, largest=1024, seconds=3.0, clock=lambda: float(next(ticks)))
    assert [d for d, _ in points] == sides(1024)
    assert points[0][1] == 1.0  # a tick between the two marks of a call
    assert [later / now for (_, now), (_, later) in itertools.pairwise(points)] == [8.0] * 4
    with pytest.raises(ValueError, match="inverse, eigen"):
        inversion_points("svd", CPU)


def test_the_curve_is_straight_in_logarithms():
    cubic = [(d, 1e-9 * d**3) for d in sides(2048)]
    table = curve(cubic, "assumed", "d^3")
    for d in (64, 100, 513, 1400, 2049, 3000):
        assert table(d) == pytest.approx(1e-9 * d**3, rel=0.05)
    noisy = curve([(64, 2e-4), (128, 1e-4), (256, 4e-4)], "assumed", "")
    assert noisy(64) <= noisy(128) <= noisy(256)
