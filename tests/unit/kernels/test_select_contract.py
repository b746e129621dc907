import re

import pytest
import torch
from selections import SEARCHES, contract, seeded, static_shapes, vectors

from thinwire.core.kernels.select import ALGORITHMS, keep_count, magnitudes, options_of, top_k
from thinwire.core.methods.topk import TopK
from thinwire.core.program import Topology
from thinwire.core.program.trace import trace


def check_exact(x, k):
    values, indices = top_k(x, k)
    contract(x, k, values, indices)
    assert torch.equal(values.float().abs().sort().values, x.float().abs().sort().values[-min(k, x.numel()) :])


@pytest.mark.parametrize("d", [1, 7, 1023, 1025, 100_003])
def test_exact_selection(d):
    for _, x in vectors(d):
        for k in sorted({1, 2, d // 100, d - 1, d, d + 5} - {0, -1}):
            check_exact(x, k)


@pytest.mark.parametrize("algorithm", SEARCHES)
@pytest.mark.parametrize("d", [1, 7, 1023, 1025])
def test_contract_and_the_text_for_gpus_chooses_the_same(algorithm, d):
    for name, x in vectors(d):
        for k in sorted({1, 2, d // 10, d // 2, d - 1, d, d + 5} - {0}):
            values, indices = top_k(x, k, algorithm, seeded(k))
            contract(x, k, values, indices)
            with static_shapes():
                values, static = top_k(x, k, algorithm, seeded(k))
            contract(x, k, values, static)
            assert torch.equal(static.sort().values, indices.sort().values), (name, k)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_contract_at_a_million(algorithm):
    d = 10**6 + 3
    for name, x in vectors(d):
        if name in ("normal", "half zeros", "zeros", "spike", "two-valued"):
            for k in (1, d // 1000, d // 10) if name == "normal" else (d // 1000,):
                contract(x, k, *top_k(x, k, algorithm, seeded()))
    x = torch.randn(d, generator=seeded())
    for k in (2, d - 1):
        contract(x, k, *top_k(x, k, algorithm, seeded()))


@pytest.mark.parametrize("algorithm", SEARCHES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_strides(algorithm, dtype):
    for d in (1025, 200_001):
        x = torch.randn(2 * d, generator=seeded(1)).to(dtype)
        for view, k in ((x[::2], 10), (x, d // 50)):
            check_exact(view, k)
            values, indices = top_k(view, k, algorithm, seeded())
            contract(view, k, values, indices)
            with static_shapes():
                static = top_k(view, k, algorithm, seeded())[1]
            assert torch.equal(static.sort().values, indices.sort().values)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("d", "count"), [(1000, 1), (1000, 500), (100_000, 3), (100_000, 500)])
def test_non_finite_entries_are_seen(algorithm, d, count):
    x = torch.randn(d, generator=seeded())
    where = torch.randperm(d, generator=seeded(1))[:count]
    x[where] = torch.nan
    x[where[: count // 2]] = -torch.inf
    for call in (lambda: top_k(x, 100, algorithm, seeded()), lambda: static(x, algorithm)):
        values, indices = call()
        contract(x, 100, values, indices)
        assert int((~values.isfinite()).sum()) >= min(100, count) * (1.0 if count < 100 else 0.9)


def static(x, algorithm):
    with static_shapes():
        return top_k(x, 100, algorithm, seeded())


@pytest.mark.parametrize("algorithm", SEARCHES)
def test_a_few_entries_in_question_are_set_apart(algorithm, monkeypatch):
    """Pieces smaller than the vector, and the few above a threshold kept by themselves, change nothing."""
    x = torch.randn(5000, generator=seeded())
    want = top_k(x, 50, algorithm, seeded())[1]
    monkeypatch.setattr(magnitudes, "PIECE", 64)
    assert torch.equal(top_k(x, 50, algorithm, seeded())[1].sort().values, want.sort().values)
    monkeypatch.setattr(magnitudes, "FEW", 10**9)
    assert torch.equal(top_k(x, 50, algorithm, seeded())[1].sort().values, want.sort().values)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_shapes_alone(algorithm):
    values, indices = top_k(torch.empty(100, device="meta"), 7, algorithm)
    assert values.shape == indices.shape == (7,)
    steps = trace(TopK(density=0.1, select=algorithm), [("w", (10, 10))], Topology(4))
    assert [step.message_bytes for step in steps] == [80]


@pytest.mark.parametrize("algorithm", SEARCHES)
def test_a_generator_decides_and_the_default_one_is_left_alone(algorithm):
    x = torch.ones(1000)
    before = torch.get_rng_state()
    runs = [top_k(x, 10, algorithm, seeded(7))[1].tolist() for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert runs[0] == runs[1]
    assert any(top_k(x, 10, algorithm, seeded(s))[1].tolist() != runs[0] for s in range(5))


def test_refusals():
    x = torch.ones(4)
    assert options_of("exact") == ()
    assert top_k(x, 0)[1].numel() == top_k(x[:0], 3)[1].numel() == 0
    for call, words in (
        (lambda: top_k(x, -1), "negative"),
        (lambda: top_k(x.view(2, 2), 1), "1-D"),
        (lambda: top_k(x, 1, "mstopk_"), "use one of 'exact'"),
        (lambda: top_k(x, 1, samplings=3), "no option 'samplings'"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    for algorithm, options, words in (
        ("gaussian", {"samplings": 3}, "no option 'samplings'; its options: rounds, window"),
        ("mstopk", {"samplings": 0}, "samplings=0"),
        ("mstopk", {"base": "median"}, "base='median' is unknown"),
        ("mstopk", {"window": "square"}, 'use "circular" or "line"'),
        ("gaussian", {"rounds": -1}, "rounds=-1"),
        ("threshold", {"sample": 0.0}, "sample=0.0"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            top_k(x, 1, algorithm, **options)


def test_keep_count():
    assert [keep_count(d, 0.01) for d in (0, 1, 99, 100, 250)] == [0, 1, 1, 1, 2]
    assert keep_count(1000, 0.1) == 100  # floor(0.1 * 1000) without the guard may be 99
    assert keep_count(7, 1.0) == 7
