import pytest

from thinwire.predict.measure.probe import coarse_to_fine, expected_seconds, message_sizes, repeats


def test_sizes_are_powers_of_two_and_the_largest():
    assert message_sizes(largest=16 << 20) == [4096 << n for n in range(13)]
    assert message_sizes(largest=20_000) == [4096, 8192, 16384, 20_000]
    with pytest.raises(ValueError, match="at least 8192"):
        message_sizes(largest=8191)


@pytest.mark.parametrize("count", range(2, 15))
def test_both_ends_come_in_the_first_pass_and_each_size_once(count):
    sizes = [4096 << n for n in range(count)]
    order = coarse_to_fine(sizes)
    assert sorted(order) == sizes
    first = order[: order.index(sizes[-1]) + 1]
    assert first[0] == sizes[0]
    assert first == sorted(first)


def test_what_is_expected_is_an_upper_bound_of_a_growing_cost():
    assert expected_seconds(8, {}) == 0
    assert expected_seconds(8, {4: 1.0}) == 2.0
    assert expected_seconds(8, {4: 1.0, 1: 0.5, 64: 7.0}) == 2.0
    assert expected_seconds(8, {4: 1.0, 16: 1.5}) == 1.5


def test_repeats():
    assert repeats(1e-4, 5.0) == 15
    assert repeats(0.3, 5.0) == 3
    assert repeats(0.7, 5.0) == 2
    assert repeats(2.0, 5.0) == 1
    assert repeats(0.3, 0.0) == 1
    assert all(repeats(t, share) * t <= max(t, share / 2) for t in (1e-3, 0.1, 0.9) for share in (0.0, 0.1, 1.0, 9.0))
