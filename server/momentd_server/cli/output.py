"""Printing: tables and pairs for people, plain columns for pipes, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click
from google.protobuf.message import Message
from rich.console import Console, Group, RenderableType
from rich.text import Text

_GAP: Final = "  "
# Characters of a name that are shown however narrow the terminal is.
_LEAST_TEXT: Final = 8


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on one line, so that repeated ones make JSON lines."""
    click.echo(json.dumps(document))


def console() -> Console:
    """Standard output. Plain and as wide as needed when it is not a terminal."""
    found = Console(highlight=False, soft_wrap=True)
    # Unlimited: a pipe has no width, and nothing must be cut off there.
    return found if found.is_terminal else Console(highlight=False, soft_wrap=True, width=10_000)


def width(out: Console) -> int | None:
    """Columns of the terminal; None in a pipe, where nothing may be cut off."""
    return out.width if out.is_terminal else None


def pairs(rows: Sequence[tuple[str, str]]) -> RenderableType:
    """Names and values, one pair a line."""
    width = max(len(name) for name, _ in rows)
    lines: list[RenderableType] = []
    for name, value in rows:
        lines.append(Text.assemble((name.ljust(width + 2), "bold"), value, overflow="fold"))
    return Group(*lines)


def columns(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[str] = (),
    spare: Sequence[str] = (),
    width: int | None = None,
) -> Text:
    """A table; columns named in `left` hold text, the others are numbers and lean right.

    Where it is wider than `width` (None: no limit), columns named in `spare` go, in that order, and
    then the longest text is shortened.
    """
    cells = [list(column) for column in zip(headers, *rows, strict=True)]
    for name in spare:
        if width is None or _total_width(cells) <= width:
            break
        cells = [column for column in cells if column[0] != name]
    if width is not None:
        _shorten(cells, left, _total_width(cells) - width)
    sizes = [max(map(len, column)) for column in cells]
    lines = [
        _GAP.join(
            cell.ljust(size) if column[0] in left else cell.rjust(size)
            for cell, size, column in zip(line, sizes, cells, strict=True)
        ).rstrip()
        for line in zip(*cells, strict=True)
    ]
    return Text.assemble((lines[0], "bold"), *("\n" + line for line in lines[1:]))


def _total_width(cells: list[list[str]]) -> int:
    return sum(max(map(len, column)) for column in cells) + len(_GAP) * (len(cells) - 1)


def _shorten(cells: list[list[str]], left: Sequence[str], excess: int) -> None:
    """Takes `excess` characters off the widest text column, down to a legible rest."""
    texts = [column for column in cells if column[0] in left]
    if excess <= 0 or not texts:
        return
    widest = max(texts, key=lambda column: max(map(len, column)))
    size = max(_LEAST_TEXT, max(map(len, widest)) - excess)
    widest[1:] = [cell if len(cell) <= size else cell[: size - 1] + "…" for cell in widest[1:]]


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON-ready values: every field by its proto name, 64-bit numbers as numbers.

    (protobuf's own JSON form writes 64-bit numbers as strings and leaves zeros out.) Bytes are
    hexadecimal, enums their names, an absent message or `optional` null.
    """
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    # Descriptors tell "repeated" by different names in protobuf 5 and 7; the value tells it too.
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_scalar(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _scalar(value, field)


def _scalar(value: Any, field: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
