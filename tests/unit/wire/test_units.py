"""Sizes and durations as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from momentd_wire.errors import InvalidArgument
from momentd_wire.units import (
    format_bytes,
    format_count,
    format_duration,
    parse_bytes,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("17b", 17),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("8G", 8 << 30),
        ("1.5GiB", 3 << 29),
        ("1.5GB", 1_500_000_000),
        (" 2TiB ", 2 << 40),
        ("18014398509481985", 18014398509481985),
    ],
)
def test_a_size_is_read_as_written(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "5 apples", "1..5G", "0x10", "1GiBB"])
def test_what_is_no_size_is_refused_with_the_forms(text):
    with pytest.raises(InvalidArgument, match="512MiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("90", 90),
        ("1.5s", 1.5),
        ("500ms", 0.5),
        ("15m", 900),
        ("1h30m", 5400),
        ("2d", 172800),
    ],
)
def test_a_duration_is_read_as_written(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "-5s", "5 minutes", "1h30", "inf", "nan"])
def test_what_is_no_duration_is_refused_with_the_forms(text):
    with pytest.raises(InvalidArgument, match="1h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (512 << 20, "512 MiB"),
        ((1 << 30) - 1, "1 GiB"),
        (2_700_000_000, "2.51 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_a_size_is_shown_with_three_digits(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (-1, "0 s"),
        (0.0012, "1.20 ms"),
        (0.9999, "1 s"),
        (45, "45 s"),
        (59.99, "1m 00s"),
        (125, "2m 05s"),
        (3600, "1h 00m"),
        (100_000, "1d 3h"),
    ],
)
def test_a_duration_is_shown_in_its_two_largest_units(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (9999, "9,999"),
        (9999.6, "10 k"),
        (12_345, "12.3 k"),
        (999_600, "1 M"),
        (2_609_295, "2.61 M"),
        (5e15, "5000 T"),
    ],
)
def test_a_count_is_shown_whole_or_with_three_digits(count, text):
    assert format_count(count) == text


@given(st.integers(0, 1 << 62))
def test_a_shown_size_is_within_a_percent_of_the_real_one(nbytes):
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.01)
