"""Dataclasses that come back from JSON as they were, and nothing else that is taken for them."""

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.checks import check_choice, check_count, check_flag, check_number
from thinwire.core.records import Record


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Point:
    x: float
    name: str = ""


@dataclass(frozen=True)
class Other:
    steps: int


@dataclass(frozen=True)
class Whole(Record):
    called = "a whole"
    count: int
    rate: float = 0.0
    on: bool = False
    word: Literal["a", "b"] = "a"
    colour: Colour = Colour.RED
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    pair: tuple[int, str] = (0, "")
    points: tuple[Point, ...] = ()
    names: list[str] = field(default_factory=list)
    limit: float | None = None
    either: Point | Other = Other(1)
    by_name: Mapping[str, Point] = field(default_factory=dict)
    by_number: Mapping[int, str] = field(default_factory=dict)
    by_pair: Mapping[tuple[str, int], float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Among(Record):
    called, alone = "some", False
    count: int


FULL = Whole(
    3, 0.5, True, "b", Colour.RED, torch.float64, (2, 3), (1, "x"), (Point(1.0, "p"),), ["n"], 4.0, Point(2.0),
    {"a": Point(0.0)}, {7: "seven"}, {("ring", 4): 0.25}, {"any": [1, None]},
)  # fmt: skip


def test_all_kinds_of_fields_come_back():
    assert Whole.from_json(FULL.to_json()) == FULL
    assert Whole.from_json('{"count": 3}') == Whole(3)
    assert Whole.from_json('{"count": 3, "rate": 1}').rate == 1.0
    assert Whole(3).hash == Whole(3).hash != Whole(4).hash
    assert Among.from_json('{"count": 3, "beside": []}') == Among(3)


@given(st.builds(Whole, st.integers(), st.floats(allow_nan=False), limit=st.none() | st.floats(allow_nan=False)))
def test_any_numbers_come_back(whole):
    assert Whole.from_json(whole.to_json()) == whole


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("count", "3", "count: '3' is not a int"),
        ("count", True, "count: True is not a int"),
        ("rate", "fast", "rate: 'fast' is not a float"),
        ("word", "c", "word: 'c' is not one of 'a', 'b'"),
        ("colour", "blue", "colour: 'blue' is not a valid Colour"),
        ("dtype", "torch.nn", "dtype: 'torch.nn' is not a dtype"),
        ("shape", "ab", "shape: 'ab' is not a list"),
        ("pair", [1], r"pair: \[1\] is not a list of 2"),
        ("points", [{"x": 1.0, "z": 2}], "points: unknown fields z"),
        ("points", [{}], "points: the field x is missing"),
        ("either", 3, "either: 3 is not the fields of a Point"),
        ("mystery", 1, "unknown fields mystery"),
    ],
)
def test_what_does_not_fit_is_named(name, value, told):
    with pytest.raises(ValueError, match=f"^this is not a whole: {told}"):
        Whole.from_json(json.dumps({"count": 1, name: value}))


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "null", "[" * 100_000])
def test_other_texts_are_refused(text):
    for kind in (Whole, Among):
        with pytest.raises(ValueError, match=f"this is not {kind.called}"):
            kind.from_json(text)


def test_checks():
    for count in (3, np.int64(3), np.uint8(3)):
        assert type(check_count("workers", count)) is int
        assert check_count("workers", count) == 3
    for number in (1, np.int32(1), np.float32(1), np.float64(1), Fraction(1)):
        assert type(check_number("lr", number, above=0)) is float
        assert check_number("lr", number, above=0) == 1.0
    assert check_choice("word", "a", ("a", "b")) == "a"
    assert check_choice("bits", 2, (None, 2)) == 2
    assert check_flag("on", True)
    with pytest.raises(ValueError, match=r"^on=1 must be True or False$"):
        check_flag("on", 1)
    with pytest.raises(ValueError, match=r"^bits=True is unknown; use one of 1, 2$"):
        check_choice("bits", True, (1, 2))
    for wrong in (0, True, 1.0, "2", np.float64(2.0), np.True_, np.int64(0), None):
        with pytest.raises(ValueError) as error:
            check_count("workers", wrong)
        assert str(error.value) == f"workers={wrong!r} must be a whole number of at least 1"
    for wrong in (0.0, float("nan"), float("inf"), "x", True, 3, np.float32("nan"), np.True_, 1j):
        with pytest.raises(ValueError) as error:
            check_number("lr", wrong, above=0, most=2)
        assert str(error.value) == f"lr={wrong!r} must be a finite number and above 0 and at most 2"
    with pytest.raises(ValueError, match=r"^word='c' is unknown; use one of a, b$"):
        check_choice("word", "c", ("a", "b"))
