import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.systems.split.codecs import Chain, Quantised, Visit

VALUES = [(), ("fp16",), ("bf16",), ("int8",), ("int4",)]
CHAINS = [*VALUES, *((*words, "pack") for words in VALUES)]
DELTAS = [("delta:2", "pack"), ("delta:4", "pack"), ("delta:8", "pack")]


def cached(chain):
    return {slot: rows.tolist() for slot, rows in chain.values.cache.items()}


def numbers(lengths, width, seed=0, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(len(lengths), max(lengths), width, generator=draw) * scale
    x[torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]] = 0
    return x


@settings(max_examples=80, deadline=None)
@given(
    bits=st.sampled_from([2, 4, 8]),
    rows=st.integers(1, 20),
    width=st.integers(1, 33),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 1000),
)
def test_quantised_error_is_within_the_bound(bits, rows, width, exponent, seed):
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    codec = Quantised(bits)
    codes, scales = codec.encode(x)
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.bfloat16)
    assert codes.shape == (rows, -(-width * bits // 8))
    s = scales.float()[:, None]
    assert (s >= x.abs()).all()  # rounded up: nothing clips
    assert (s <= x.abs().amax(1, keepdim=True) * (1 + 2**-7)).all()
    back = codec.decode([codes, scales], width, torch.float32)
    assert ((back - x).abs() <= s / (2 * (2 ** (bits - 1) - 1)) * (1 + 1e-5)).all()


def test_zeros_and_a_single_large_number():
    x = torch.zeros(3, 5)
    x[1, 2] = 3e38
    codec = Quantised(8)
    back = codec.decode(codec.encode(x), 5, torch.float32)
    assert back[0].abs().max() == 0
    assert back[1, 2] == pytest.approx(3e38, rel=0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(value):
    x = torch.zeros(1, 2, 4)
    x[0, 0, 0] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        Chain(("int8",)).encode(x, Visit([2]))


@settings(max_examples=60, deadline=None)
@given(
    words=st.sampled_from(CHAINS), lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), width=st.integers(1, 13)
)
def test_bytes_are_as_said_and_numbers_come_back(words, lengths, width):
    x = numbers(lengths, width)
    chain, visit = Chain(words), Visit(list(lengths))
    parts = chain.encode(x, visit)
    size = sum(part.numel() * part.element_size() for part in parts)
    assert size == chain.nbytes(len(lengths), max(lengths), visit, width, 4)
    assert len(parts) == chain.parts(True)
    back = Chain(words).decode(parts, visit, width, torch.float32, length=max(lengths))
    assert back.shape == x.shape
    bound = {"fp16": 2**-11, "bf16": 2**-8, "int8": 1.01 / 254, "int4": 1.01 / 14}
    tolerance = bound[words[0]] if words and words[0] in bound else 0.0
    assert ((back - x).abs() <= tolerance * x.abs().amax(-1, keepdim=True) + 1e-7 * bool(tolerance)).all()


def test_pack_sends_real_tokens_only():
    x = numbers((5, 1, 2), 8)
    padded = torch.cat([x, torch.zeros(3, 20, 8)], dim=1)
    visit = Visit([5, 1, 2])
    parts = Chain(("int8", "pack")).encode(padded, visit)
    assert [tuple(part.shape) for part in parts] == [(8, 8), (8,)]
    again = Chain(("int8", "pack")).encode(x, visit)
    assert all(torch.equal(a, b) for a, b in zip(parts, again))
    assert sum(part.numel() * part.element_size() for part in parts) == 8 * (8 + 2)


def test_fp16_saturates():
    x = torch.full((1, 1, 2), 1e6)
    assert Chain(("fp16",)).encode(x, Visit([1]))[0].tolist() == [[[65504.0, 65504.0]]]


@pytest.mark.parametrize("words", DELTAS)
def test_delta_comes_nearer_with_every_visit_and_both_caches_stay_equal(words):
    bits = int(words[0][-1])
    ends = Chain(words), Chain(words)
    lengths, width = [3, 6, 2, 5], 8
    x = numbers(lengths, width)
    for epoch in range(3):
        change = numbers(lengths, width, seed=epoch + 1, scale=0.01 * bool(epoch))
        x = x + change
        for slots in ([0, 1], [2, 3]):
            visit = Visit([lengths[s] for s in slots], slots)
            longest = max(visit.lengths)
            parts = ends[0].encode(x[slots, :longest], visit)
            size = sum(part.numel() * part.element_size() for part in parts)
            fresh = sum(visit.lengths) if epoch == 0 else 0
            assert size == ends[0].nbytes(2, longest, visit, width, 4, fresh)
            back = ends[1].decode(parts, visit, width, torch.float32)
            error = (back - x[slots, :longest]).abs().max()
            if epoch == 0:
                assert error == 0  # the first visit goes as it is
            else:
                steps = 2 * (2 ** (bits - 1) - 1)
                assert error <= 1.02 * parts[2].float().max() / steps + 1e-7
                assert parts[2].float().max() < 0.2  # scales are those of the change
            assert cached(ends[0]) == cached(ends[1])
    restored = Chain(words)
    restored.values.load_state(ends[0].values.state())
    assert cached(restored) == cached(ends[1])
    assert cached(Chain(words)) != cached(restored)


def test_evaluation_touches_no_cache():
    chain, other = Chain(DELTAS[1]), Chain(DELTAS[1])
    x = numbers((3, 2), 4)
    visit = Visit([3, 2], [0, 1], training=False)
    parts = chain.encode(x, visit)
    assert torch.equal(other.decode(parts, visit, 4, torch.float32), x)
    assert not chain.values.cache
    assert not other.values.cache
    assert sum(p.numel() * 4 for p in parts) == chain.nbytes(2, 3, visit, 4, 4)


def test_delta_refuses_what_its_cache_does_not_fit():
    chain, other = Chain(DELTAS[1]), Chain(DELTAS[1])
    x = numbers((3, 2), 4)
    first = chain.encode(x, Visit([3, 2], [0, 1]))
    other.decode(first, Visit([3, 2], [0, 1]), 4, torch.float32)
    kept = cached(other)
    for parts, slots in ((first, [0, 1]), (first, [0, 2])):
        with pytest.raises(ValueError, match="caches of delta:4 differ"):
            other.decode(parts, Visit([3, 2], slots), 4, torch.float32)
    for words, call in (
        ("changed length", lambda: chain.encode(x, Visit([2, 2], [0, 1]))),
        ("occurs twice", lambda: chain.encode(x, Visit([3, 2], [5, 5]))),
        ("did not send a slot per sample", lambda: other.decode(first, Visit([3, 2], None), 4, torch.float32)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert cached(other) == kept


@pytest.mark.parametrize(
    "words, spoil",
    [((), "missing"), ((), "dtype"), (("int8",), "width"), (("int8",), "rows"), (("int8", "pack"), "rows")],
)
def test_parts_of_something_else_are_refused(words, spoil):
    x = numbers((3, 2), 4)
    visit = Visit([3, 2])
    parts = Chain(words).encode(x, visit)
    spoiled = {
        "width": [parts[0][..., :-1].contiguous(), *parts[1:]],
        "dtype": [parts[0].to(torch.float64), *parts[1:]],
        "missing": parts[:-1],
        "rows": [part[:-1] for part in parts],
    }
    with pytest.raises(ValueError, match="the other end sent"):
        Chain(words).decode(spoiled[spoil], visit, 4, torch.float32)
