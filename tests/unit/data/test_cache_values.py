"""Samples as bytes and back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.systems.data.values import pack, size_of, unpack

DTYPES = [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float16, torch.bool]
LEAVES = st.one_of(
    st.integers(),
    st.floats(),
    st.text(),
    st.booleans(),
    st.binary(max_size=20),
    st.builds(lambda d, s: torch.arange(max(1, int(np.prod(s)))).to(d)[: int(np.prod(s))].reshape(s),
              st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
    st.builds(lambda n: np.arange(n, dtype=np.float64), st.integers(0, 5)),
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)),
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


def equal(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b or (a != a and b != b)


@settings(max_examples=70, deadline=None)
@given(TREES)
def test_round_trip(value):
    packed = pack(value)
    assert equal(unpack(packed), value)
    assert pack(unpack(packed)) == packed


def test_views_are_stored_alone_and_sizes_are_counted():
    base = torch.arange(1_000_000)
    value = {"a": base[5:9], "same": base[5:9], "t": base[:6].reshape(2, 3).t(), "b": b"12345", "n": 3}
    packed = pack(value)
    assert len(packed) < 2000
    assert equal(unpack(packed), value)
    assert size_of(value) == 4 * 8 + 4 * 8 + 6 * 8 + 5 + 8


def test_read_only_arrays_and_gradients():
    array = np.arange(4.0)
    array.flags.writeable = False
    weight = torch.ones(3, requires_grad=True)
    a, w = unpack(pack((array, weight)))
    a += 1
    w += 1
    assert array.sum() == 6
    assert weight.sum() == 3


PICTURE = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


@pytest.mark.parametrize(
    "value",
    [
        PICTURE.transpose(2, 0, 1),
        np.moveaxis(PICTURE, -1, 0),
        np.asfortranarray(PICTURE[..., 0]),
        PICTURE[::-2, :, 1:],
        PICTURE.astype(">f4"),
        np.array(7, ">i8"),
        np.array(2.5),
        np.broadcast_to(np.float16(3), (2, 3)),
        np.arange(3, dtype=np.uint16),
    ],
)
def test_arrays_of_any_layout_and_byte_order(value):
    back = unpack(pack(value))
    assert type(back) is np.ndarray
    assert back.dtype == value.dtype.newbyteorder("=")
    assert back.shape == value.shape
    assert np.array_equal(back, value)


def test_a_mapped_file(tmp_path):
    np.save(tmp_path / "x.npy", PICTURE)
    assert np.array_equal(unpack(pack(np.load(tmp_path / "x.npy", mmap_mode="r")[1])), PICTURE[1])


class Boxes(torch.Tensor):
    """A subclass that tells a transform what to do."""


class Name(bytes):
    """A subclass that something may depend on."""


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 4).as_subclass(Boxes),
        torch.nn.Parameter(torch.ones(2)),
        np.ma.MaskedArray([1.0, 2.0], mask=[False, True]),
        np.ones((2, 2)).view(np.matrix),
        np.zeros(2, [("x", "f4")]).view(np.recarray),
        Name(b"x"),
    ],
)
def test_subclasses_are_refused_by_name(value):
    with pytest.raises(TypeError, match=f"sample\\[0\\] is a {type(value).__name__}, which cannot be stored"):
        pack((value,))


@pytest.mark.parametrize("value", [{1: 2}, torch.ones(3).to_sparse(), torch.ones(3, dtype=torch.complex128), object()])
def test_the_rest_is_refused(value):
    with pytest.raises(TypeError, match="store"):
        pack(value)
