"""Bytes, counts and durations as people write and read them: "512MiB", "15m". Pure functions."""

from __future__ import annotations

import re
from typing import Final

from momentd_wire.errors import InvalidArgument

_BINARY: Final = ("KiB", "MiB", "GiB", "TiB")
_BYTES: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    # One letter means the binary unit, as in dd, docker and systemd.
    **{letter: 1 << (10 * (i + 1)) for i, letter in enumerate("kmgt")},
    **{unit.lower(): 1 << (10 * (i + 1)) for i, unit in enumerate(_BINARY)},
    **{f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgt")},
}
_SECONDS: Final[dict[str, float]] = {
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)")
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+")
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")


def parse_bytes(text: str) -> int:
    """Bytes of "8GiB", "512M", "1.5GB" or "4096". Raises InvalidArgument naming the forms."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _BYTES:
        raise InvalidArgument(
            f"{text!r} is not a size: write a number with KiB, MiB, GiB or TiB, e.g. 512MiB"
        )
    number, unit = match.groups()
    # Whole numbers stay whole: a float cannot hold every 64-bit size.
    return round(float(number) * _BYTES[unit]) if "." in number else int(number) * _BYTES[unit]


def parse_duration(text: str) -> float:
    """Seconds of "15m", "1h30m", "500ms" or "90". Raises InvalidArgument naming the forms."""
    plain = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", plain):
        return float(plain)
    if not _DURATION.fullmatch(plain):
        raise InvalidArgument(
            f"{text!r} is not a duration: write a number with ms, s, m, h or d, e.g. 15m or 1h30m"
        )
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(plain))


def format_bytes(nbytes: float) -> str:
    """Three significant digits: "0 B", "1023 B", "512 MiB", "1.25 GiB"."""
    if abs(nbytes) < 1024:
        return f"{nbytes:.0f} B"
    value = float(nbytes)
    for unit in _BINARY:
        value /= 1024
        # What would round up to 1024 belongs to the next unit.
        if abs(value) < 1023.5 or unit == _BINARY[-1]:
            return f"{_three_digits(value)} {unit}"
    raise AssertionError("unreachable: the last unit takes everything")


def format_count(count: float) -> str:
    """Whole numbers below 10,000, then three digits: "9,999", "12.3 k", "2 M"."""
    if abs(count) < 9999.5:
        return f"{count:,.0f}"
    value, unit = float(count), ""
    for larger in ("k", "M", "G", "T"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{_three_digits(value)} {unit}"


def format_duration(seconds: float) -> str:
    """The two largest units: "1.20 ms", "45.0 s", "2m 05s", "3h 07m", "12d 4h"."""
    if seconds <= 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    text = f"{value:.{0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2}f}"
    # "512", "1.25", but "2" rather than "2.00".
    whole, _, fraction = text.partition(".")
    return whole if not fraction.strip("0") else text
