import pytest

from thinwire.tools.lab import LabError, format_rate, parse_delay, parse_rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1gbit", 10**9),
        ("100mbit", 10**8),
        ("2.5gbit", 2_500_000_000),
        (" 10GBit ", 10**10),
        ("512kbit", 512_000),
        ("1000000bit", 10**6),
        ("0.4tbit", 4 * 10**11),
    ],
)
def test_rates_are_read(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "1",
        "1 gbit",
        "1gb",
        "-1gbit",
        "1e3mbit",
        "gbit",
        "1gbit2",
        "1,5gbit",
        "99kbit",
        "2tbit",
        "0gbit",
        "\u0661gbit",
    ],
)
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(LabError, match=r"use .*\dg?m?bit"):
        parse_rate(text)


def test_bps_is_refused_because_tc_means_bytes():
    with pytest.raises(LabError, match="use 100mbit"):
        parse_rate("100mbps")


@pytest.mark.parametrize(
    "text", ["1gbit", "100mbit", "2.5gbit", "10gbit", "1tbit", "1.544mbit", "100kbit", "123456.789kbit"]
)
def test_writing_a_rate_is_the_inverse_of_reading_it(text):
    assert format_rate(parse_rate(text)) == text


def test_no_limit_is_written_so():
    assert format_rate(None) == "unlimited"


@pytest.mark.parametrize(
    ("text", "seconds"), [("1ms", 1e-3), ("250us", 250e-6), ("0.05s", 0.05), ("0", 0.0), ("0ms", 0.0)]
)
def test_delays_are_read(text, seconds):
    assert parse_delay(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "1", "ms", "1m", "-1ms", "11s", "soon"])
def test_what_is_no_delay_is_refused_with_an_example(text):
    with pytest.raises(LabError, match="use for example 1ms"):
        parse_delay(text)
