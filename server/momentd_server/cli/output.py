"""Printing: tables and pairs for people, plain columns for pipes, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click
from google.protobuf.message import Message
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on one line, so that repeated ones make JSON lines."""
    click.echo(json.dumps(document))


def console() -> Console:
    """Standard output. Plain and as wide as needed when it is not a terminal."""
    found = Console(highlight=False, soft_wrap=True)
    # Unlimited: a pipe has no width, and nothing must be cut off there.
    return found if found.is_terminal else Console(highlight=False, soft_wrap=True, width=10_000)


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
    terminal: bool,
) -> RenderableType:
    """A table; columns named in `left` hold text, the others are numbers and lean right.

    On a terminal it fits the width; in a pipe it is columns with two spaces between them.
    """
    if terminal:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for header in headers:
            table.add_column(header, justify="left" if header in left else "right")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        return table
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if header in left else cell.rjust(width)
            for header, cell, width in zip(headers, row, widths, strict=True)
        ).rstrip()
        for row in (headers, *rows)
    ]
    return Text("\n".join(lines))


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
