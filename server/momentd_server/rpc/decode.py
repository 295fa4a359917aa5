"""Wire messages to domain types, or InvalidArgument naming the field."""

from __future__ import annotations

from typing import Final

import numpy as np

from momentd_server.engine.api import OpenMode, Result, TableBatch, TableView
from momentd_server.rpc.bulks import Bulks
from momentd_server.rules import SparseAdamHyper
from momentd_server.schema import MAX_RECORD_BYTES, FieldSpec, Schema
from momentd_wire import codec
from momentd_wire.errors import InvalidArgument, UnsupportedFeature
from momentd_wire.v1 import momentd_pb2 as pb

MAX_TEXT: Final = 255
MAX_FIELDS: Final = 16
MAX_ROWS: Final = 1 << 48

INT64: Final = np.dtype("<i8")
UINT8: Final = np.dtype("u1")
_RESULTS: Final[dict[int, Result]] = {
    pb.RESULT_KIND_DELTA: "delta",
    pb.RESULT_KIND_VALUE: "value",
    pb.RESULT_KIND_NONE: "none",
}
_MODES: Final[dict[int, OpenMode]] = {
    pb.OpenTableRequest.MODE_UNSPECIFIED: "open_or_create",
    pb.OpenTableRequest.MODE_OPEN_OR_CREATE: "open_or_create",
    pb.OpenTableRequest.MODE_CREATE: "create",
    pb.OpenTableRequest.MODE_OPEN: "open",
}


def text(value: str, what: str) -> str:
    """A label for people: at most 255 characters, all printable."""
    if len(value) > MAX_TEXT or not value.isprintable():
        raise InvalidArgument(
            f"{what} {value[:40]!r} must have at most {MAX_TEXT} printable characters"
        )
    return value


def table_name(value: str) -> str:
    """A table's name: a text that is not empty and has no space at its ends."""
    if not value or value != value.strip():
        raise InvalidArgument(f"table name {value!r} is empty, or starts or ends with a space")
    return text(value, "table name")


def open_mode(mode: int) -> OpenMode:
    if mode not in _MODES:
        raise UnsupportedFeature(f"open mode {mode} is not known to this daemon")
    return _MODES[mode]


def schema(message: pb.Schema) -> Schema:
    """A schema. Raises InvalidArgument, UnsupportedFeature (an element type)."""
    if message.rows > MAX_ROWS:
        raise InvalidArgument(f"schema.rows is {message.rows}, the most is {MAX_ROWS}")
    if not 1 <= len(message.fields) <= MAX_FIELDS:
        raise InvalidArgument(
            f"schema.fields has {len(message.fields)} entries, it needs 1 to {MAX_FIELDS}"
        )
    if message.width < 1:
        raise InvalidArgument("schema.width is 0, it must be at least 1")
    result = Schema(
        rows=message.rows,
        width=message.width,
        fields=tuple(_field(field) for field in message.fields),
        rule=message.rule,
    )
    names = [field.name for field in result.fields]
    if len(set(names)) != len(names):
        raise InvalidArgument(f"schema.fields has a name twice: {names}")
    if result.record_bytes > MAX_RECORD_BYTES:
        raise InvalidArgument(
            f"a record of this schema has {result.record_bytes} bytes, the most is "
            f"{MAX_RECORD_BYTES}"
        )
    return result


def _field(message: pb.FieldSpec) -> FieldSpec:
    if not message.name.isidentifier() or len(message.name) > MAX_TEXT:
        raise InvalidArgument(f"schema.fields: {message.name[:40]!r} is not an identifier")
    if not 1 <= message.width <= MAX_RECORD_BYTES:
        raise InvalidArgument(f"schema.fields.{message.name}: width is {message.width}")
    dtype = element_type(message.dtype, f"schema.fields.{message.name}.dtype")
    return FieldSpec(message.name, dtype.name, message.width, message.initial)


def element_type(dtype: pb.DType, what: str) -> np.dtype:
    try:
        return codec.to_numpy(dtype)
    except KeyError:
        raise UnsupportedFeature(f"{what}: element type {dtype} is not implemented") from None


def batch(message: pb.TableUpdate, view: TableView, bulks: Bulks) -> TableBatch:
    """One table's part of an update, its arrays resolved by `bulks`."""
    schema = view.schema
    dtype = schema.state_dtype
    count, width = message.count, schema.width
    _check_dtype(message.dtype, dtype, "tables.dtype")
    result = _RESULTS.get(message.result)
    if result is None:
        raise InvalidArgument(f"tables.result is {message.result}: say DELTA, VALUE or NONE")
    rows = bulks.read(message.row_ids, INT64, (count,), "tables.row_ids")
    grads = bulks.read(message.grads, dtype, (count, width), "tables.grads")
    mask = weights = out_values = out_factors = None
    if message.HasField("mask"):
        mask = bulks.read(message.mask, UINT8, (count, width), "tables.mask")
    if message.HasField("weights"):
        weights = bulks.read(message.weights, dtype, (count, width), "tables.weights")
    room = min(count, schema.rows)
    if result != "none":
        region = message.result_values if message.HasField("result_values") else None
        out_values = bulks.room(region, dtype, (room, width), "tables.result_values")
    region = message.result_rows if message.HasField("result_rows") else None
    out_rows = bulks.room(region, INT64, (room,), "tables.result_rows")
    if message.HasField("result_factors"):
        out_factors = bulks.room(message.result_factors, dtype, (room,), "tables.result_factors")
    return TableBatch(
        id=view.id,
        generation=message.table.generation,
        step=message.step if message.HasField("step") else None,
        expected_update_number=(
            message.expected_update_number if message.HasField("expected_update_number") else None
        ),
        hyper=_hyper(message),
        result=result,
        rows=rows,
        grads=grads,
        mask=mask,
        weights=weights,
        out_rows=out_rows,
        out_values=out_values,
        out_factors=out_factors,
    )


def _check_dtype(dtype: pb.DType, wanted: np.dtype, what: str) -> None:
    if element_type(dtype, what) != wanted:
        raise InvalidArgument(
            f"{what} is {codec.to_numpy(dtype).name}, the table's state is {wanted.name}"
        )


def _hyper(message: pb.TableUpdate) -> SparseAdamHyper:
    if message.WhichOneof("hyper") != "sparse_adam":
        raise UnsupportedFeature(
            "tables.hyper is missing, or of a rule that this daemon does not know"
        )
    told = message.sparse_adam
    return SparseAdamHyper(told.lr, told.beta1, told.beta2, told.eps, told.maximize)


def row_range(message: pb.RowRange, view: TableView) -> tuple[int, int]:
    """(start, count) of a range that lies in the table."""
    if message.start + message.count > view.schema.rows:
        raise InvalidArgument(
            f"rows {message.start}..{message.start + message.count} are beyond the table's "
            f"{view.schema.rows} rows"
        )
    return message.start, message.count


def fields(names: list[str], view: TableView) -> list[FieldSpec]:
    """The named fields, or all. Raises InvalidArgument naming those that exist."""
    if not names:
        return list(view.schema.fields)
    known = {field.name: field for field in view.schema.fields}
    for name in names:
        if name not in known:
            raise InvalidArgument(
                f"table {view.id} has no field {name[:40]!r}; it has {', '.join(known)}"
            )
    if len(set(names)) != len(names):
        raise InvalidArgument(f"a field is named twice: {', '.join(names)}")
    return [known[name] for name in names]
