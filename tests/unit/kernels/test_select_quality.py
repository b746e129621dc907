"""How good the choices are: recall, contraction, equal inclusion (sparsified.md, tests 7 to 9)."""

import pytest
import torch
from scipy.stats import chisquare
from selections import SEARCHES, laplace, recall, seeded

from thinwire.core.kernels.select import ALGORITHMS, top_k
from thinwire.core.kernels.select.band import Band, draw, take
from thinwire.core.kernels.select.magnitudes import Magnitudes
from thinwire.core.kernels.select.mstopk import search

D = 10**6


@pytest.mark.parametrize("name", ["normal", "laplace"])
def test_mstopk_recall(name):
    x = torch.randn(D, generator=seeded()) if name == "normal" else laplace(D)
    for samplings, least in ((10, 0.99), (15, 0.999), (30, 0.9999)):
        for base in ("auto", "mean"):
            indices = top_k(x, D // 100, "mstopk", seeded(), samplings=samplings, base=base)[1]
            assert recall(x, indices) >= least


def test_mstopk_where_the_mean_is_no_lower_bound():
    outlier = torch.randn(D, generator=seeded()) * 1e-4
    outlier[-1] = 1e3
    dense = torch.randn(D, generator=seeded())
    assert recall(outlier, top_k(outlier, D // 100, "mstopk", seeded())[1]) >= 0.98
    assert recall(outlier, top_k(outlier, D // 100, "mstopk", seeded(), base="min")[1]) >= 0.98
    assert recall(dense, top_k(dense, D * 6 // 10, "mstopk", seeded())[1]) >= 0.999
    assert recall(outlier, top_k(outlier, D // 100, "mstopk", seeded(), base="mean")[1]) < 0.5  # as published


@pytest.mark.parametrize("samplings", [1, 5, 30])
def test_mstopk_keeps_all_above_and_none_below_the_band(samplings):
    x = torch.randn(100_003, generator=seeded())
    band = search(Magnitudes(x, 1000), samplings)
    chosen = torch.zeros(x.numel(), dtype=torch.bool)
    chosen[top_k(x, 1000, "mstopk", seeded(), samplings=samplings)[1]] = True
    assert chosen[x.abs() >= band.high].all()
    assert (x.abs()[chosen] >= band.low).all()
    assert 0 <= band.low < band.high


def inclusions(need, window, draws=10**4):
    """How often each of 40 entries in the band is taken; 5 entries above it always are."""
    x = torch.ones(45)
    x[::9] = 2.0
    field = Magnitudes(x, 5 + need)
    band, generator = Band(field, 5 + need), seeded(5)
    band.high, band.low = 1.5, 0.5
    counts = torch.zeros(45, dtype=torch.int64)
    for _ in range(draws):
        counts[take(field, band, draw(generator), window)] += 1
    assert (counts[::9] == draws).all()
    return counts[x == 1.0]


@pytest.mark.slow
def test_inclusion_in_the_band():
    """Every entry of the band equally often; the published window without wrap takes both ends too rarely."""
    draws = 10**4
    assert chisquare(inclusions(1, "circular")).pvalue > 0.001
    spread = (draws * 0.25 * 0.75) ** 0.5  # of the count of one entry, taken with probability 10 / 40
    assert ((inclusions(10, "circular") - draws / 4).abs() < 4.5 * spread).all()
    line = inclusions(10, "line")
    assert max(line[0], line[-1]) < 0.05 * draws < 0.25 * draws < line[10:30].min()


@pytest.mark.parametrize("algorithm", SEARCHES)
def test_inclusion_among_equals(algorithm):
    x, draws, counts, generator = torch.ones(50), 2000, torch.zeros(50, dtype=torch.int64), seeded(1)
    for _ in range(draws):
        counts[top_k(x, 1, algorithm, generator)[1]] += 1
    assert chisquare(counts).pvalue > 0.001


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_contraction(algorithm):
    """||x - C(x)||^2 <= (1 - k/d) ||x||^2, where the band lies above the rms."""
    for x in (torch.randn(10_000, generator=seeded()), laplace(10_000), torch.ones(10_000), torch.arange(10_000.0)):
        x = x.double()
        for k in (10, 100, 1000):
            rest = x.clone()
            rest[top_k(x, k, algorithm, seeded())[1]] = 0
            assert rest.square().sum() / x.square().sum() <= 1 - k / 10_000 + 1e-12


def test_the_sharper_bound_does_not_hold_for_every_vector():
    """(1 - k/d)^2 of arXiv:1911.08772 assumes bell-shaped samples: the constant vector breaks it."""
    d, k = 1000, 100
    for x, holds in ((torch.randn(d, generator=seeded()), True), (torch.ones(d), False)):
        rest = x.clone()
        rest[top_k(x, k)[1]] = 0
        assert (rest.square().sum() <= (1 - k / d) ** 2 * x.square().sum()) == holds


@pytest.mark.parametrize("algorithm", SEARCHES)
def test_one_spike_beyond_fp32_indices(algorithm):
    """An index of 2^24 + 2 would not survive fp32."""
    d = 2**24 + 3
    x = torch.zeros(d)
    x[-1] = -1.0
    values, indices = top_k(x, 1, algorithm, seeded())
    assert indices.tolist() == [d - 1]
    assert values.tolist() == [-1.0]


@pytest.mark.parametrize("algorithm", ["gaussian", "threshold"])
def test_recall_of_sampled_and_fitted_thresholds(algorithm):
    for x in (torch.randn(D, generator=seeded(3)), laplace(D, 3)):
        for k in (D // 1000, D // 100):
            assert recall(x, top_k(x, k, algorithm, seeded())[1]) >= (1.0 if algorithm == "threshold" else 0.6)
    few = torch.randn(50, generator=seeded())  # d < 1 / density
    assert recall(few, top_k(few, 1, "threshold", seeded())[1]) == 1.0
