"""A handle of one table: rows in, rows out, as numpy arrays or torch tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from momentd import rules
from momentd._arrays import like, row_ids, select, values
from momentd._rows import UINT8, GatherCall, PrefetchCall, ScatterCall, Selection
from momentd._stream import Stream, UpdateResult, UpdateSpec, complete
from momentd_wire import codec
from momentd_wire.errors import InvalidArgument
from momentd_wire.v1 import momentd_pb2 as pb

if TYPE_CHECKING:
    from momentd._session import Session

# Gather and scatter go in pieces of about this size: enough to be fast, little in memory.
_PIECE_BYTES: Final = 32 << 20


class Table:
    """A table of a daemon. Cheap to make, safe to share between threads, may be pickled.

    A handle does not own its table: named ones stay until they are dropped, others end with the
    session (the optimizer or client) that opened them.
    """

    def __init__(self, session: Session, info: pb.TableInfo) -> None:
        self._session = session
        self._info = info
        self.id: int = info.table.id
        self.generation: int = info.table.generation
        self.rows: int = info.schema.rows
        self.width: int = info.schema.width
        """Elements of one row of the parameter; also `dim`."""
        self.step: int = info.step
        """The step counter as of the last reply that this handle saw; see `refresh`."""
        self.update_number: int = info.update_number
        """Counts the changes of the table, like `step` as of the last reply."""
        self._stream: Stream | None = None
        # Held during an update through this handle. Re-entrant, see Arena._lock.
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        fields = ", ".join(self.fields)
        return (
            f"Table({name}id={self.id}, rows={self.rows}, dim={self.dim}, rule={self.rule}, "
            f"fields=[{fields}], step={self.step}, at {self._session.where})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        recipe = (self._session.address, self._session.run, self._info.SerializeToString())
        return _unpickle, recipe

    # ------------------------------------------------------------------------------- what it is

    @property
    def name(self) -> str | None:
        """The name under which it can be opened; None for a table of one session."""
        return self._info.name or None

    @property
    def label(self) -> str:
        """For people: the parameter's name."""
        return self._info.label

    @property
    def run(self) -> str:
        """The experiment that it belongs to."""
        return self._info.run

    @property
    def dim(self) -> int:
        """Elements of one row of the parameter."""
        return self.width

    @property
    def rule(self) -> str:
        """Name of the update rule."""
        return self._info.schema.rule

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the record's fields, in record order."""
        return tuple(field.name for field in self._info.schema.fields)

    @property
    def dtype(self) -> np.dtype:
        """Element type of the state, of gradients and of results."""
        return codec.to_numpy(self._info.schema.fields[0].dtype)

    @property
    def schema(self) -> pb.Schema:
        """As on the wire."""
        return self._info.schema

    @property
    def record_bytes(self) -> int:
        """Bytes of one row's record."""
        return self._info.record_bytes

    @property
    def request_rows(self) -> int:
        """Most rows of one update."""
        return self._info.request_rows

    def refresh(self) -> Table:
        """Ask the daemon for `step` and `update_number`; returns self. Raises TableNotFound."""
        info = self._session.describe(id=self.id)
        self._seen(info.step, info.update_number)
        return self

    def _seen(self, step: int, update_number: int) -> None:
        self.step = step
        self.update_number = update_number

    def _ref(self) -> pb.TableRef:
        return pb.TableRef(id=self.id, generation=self.generation)

    # ------------------------------------------------------------------------------- update

    def update(
        self,
        rows: Any,
        grads: Any,
        *,
        mask: Any = None,
        step: int | None = None,
        **hyper: Any,
    ) -> UpdateResult:
        """Gather, rule, write back: one atomic update of distinct or repeated rows.

        Args:
            rows: Integer ids, (n,). Gradients of a repeated id are summed first, in order.
            grads: (n, dim), of any float type: converted to the state's.
            mask: (n, dim), true where the gradient has an element; default: everywhere.
            step: What bias correction counts; default: the table's counter + 1.
            hyper: Of the rule, e.g. lr, betas, eps, maximize for `sparse_adam`.

        Returns:
            `rows`: the distinct ids, int64 (m,), ascending; `values`: what to add to the weights,
            (m, dim). Tensors if `grads` is one.

        Raises:
            InvalidArgument, RowOutOfRange, CacheTooSmall, OutOfSpace: nothing was changed.
            DaemonUnavailable: no answer in time. Whether it was done shows in the next call, which
                completes it first.
        """
        ids = row_ids(rows)
        shape = (ids.shape[0], self.width)
        gradients = values("grads", grads, shape, self.dtype)
        elements = None if mask is None else values("mask", mask, shape, UINT8)
        wire = pb.TableUpdate()
        rules.by_name(self.rule).set_hyper(wire, **hyper)
        spec = UpdateSpec(
            table=self,
            count=ids.shape[0],
            dtype=self.dtype,
            hyper=wire.sparse_adam,
            masked=elements is not None,
            step=step,
        )
        with self._lock:
            result = self._update(spec, ids, gradients, elements)
        return UpdateResult(
            result.step,
            result.update_number,
            like(grads, result.rows),
            like(grads, result.values),
        )

    def _update(
        self, spec: UpdateSpec, ids: np.ndarray, grads: np.ndarray, mask: np.ndarray | None
    ) -> UpdateResult:
        stream = self._stream
        if stream is None:
            stream = self._stream = self._session.stream()
        left = stream.pending
        if left is not None:
            # An earlier call was broken off. Its caller is gone, and with it who wants the outcome.
            complete(left)
        update = stream.new_update([spec], report_progress=False)
        item = update.inputs[0]
        item.rows[:] = ids
        item.grads[:] = grads
        if item.mask is not None and mask is not None:
            np.not_equal(mask, 0, out=item.mask, casting="unsafe")
        update.send()
        try:
            result = update.results()[0]
            # The caller keeps it; the block is for the next update.
            return replace(result, rows=result.rows.copy(), values=result.values.copy())
        finally:
            if update.done:
                update.close()

    # ------------------------------------------------------------------------------- rows

    def gather(self, rows: Any = None, fields: str | Sequence[str] | None = None) -> Any:
        """Read fields of rows. Rows that were never touched have their initial values.

        Args:
            rows: Integer ids (any order, repeated ones allowed), a range or slice of step 1, or
                None for all. More than fit one request go in several: each is a consistent cut, all
                together are not if somebody updates meanwhile.
            fields: One name, several, or None for all.

        Returns:
            For one name (or a list of one): its array, (n, width). Else a dict of name -> array.
            Tensors if `rows` is one.
        """
        names = [fields] if isinstance(fields, str) else list(fields or self.fields)
        specs = [self._field(name) for name in names]
        selection = select(rows, self.rows)
        arrays = [
            np.empty((selection.count, spec.width), codec.to_numpy(spec.dtype)) for spec in specs
        ]
        for start, part in self._pieces(selection, specs):
            call = GatherCall(self._ref(), specs, part)
            reply = self._session.finish(call, "rows")
            for array, piece in zip(arrays, call.values(), strict=True):
                array[start : start + part.count] = piece
            self._seen(reply.gather.step, reply.gather.update_number)
        found = {name: like(rows, array) for name, array in zip(names, arrays, strict=True)}
        return found[names[0]] if fields is not None and len(names) == 1 else found

    def scatter(self, rows: Any = None, *, step: int | None = None, **fields: Any) -> None:
        """Write fields of rows as they are: `table.scatter(rows, exp_avg=array)`.

        Args:
            rows: Distinct ids, a range or slice of step 1, or None for all.
            step: Also set the step counter.
            fields: Name -> (n, width). Other fields keep their values.

        Raises:
            InvalidArgument: A shape, an unknown field, or a row that stands twice.
        """
        specs = [self._field(name) for name in fields]
        if not specs:
            raise InvalidArgument(f"say which fields to write: {', '.join(self.fields)}")
        selection = select(rows, self.rows)
        arrays = {
            spec.name: values(
                spec.name,
                fields[spec.name],
                (selection.count, spec.width),
                codec.to_numpy(spec.dtype),
            )
            for spec in specs
        }
        pieces = list(self._pieces(selection, specs))
        if len(pieces) > 1 and selection.ids is not None:
            # The daemon sees one piece at a time.
            _check_distinct(selection.ids)
        for start, part in pieces:
            block = {name: array[start : start + part.count] for name, array in arrays.items()}
            reply = self._session.change(ScatterCall(self._ref(), block, part, step))
            self._seen(reply.scatter.step, reply.scatter.update_number)

    def prefetch(self, rows: Any) -> int:
        """Start reading rows ahead and return at once; returns how many will be read."""
        selection = select(rows, self.rows)
        if selection.ids is None:
            stop = selection.start + selection.count
            selection = select(np.arange(selection.start, stop, dtype=np.int64), self.rows)
        reading = 0
        for _, part in self._pieces(selection, []):
            call = PrefetchCall(self._ref(), part)
            reading += self._session.finish(call, "a read-ahead").prefetch.reading
        return reading

    def read_ahead(self, ids: np.ndarray) -> None:
        """Prefetch what there is of these ids (int64) if the connection stands; never reconnects.

        Ids that do not exist are ignored, and so is a daemon that does not answer soon.
        """
        ids = ids[(ids >= 0) & (ids < self.rows)]
        for _, part in self._pieces(Selection(ids, 0, ids.size), []) if ids.size else ():
            self._session.attempt(PrefetchCall(self._ref(), part))

    def _field(self, name: str) -> pb.FieldSpec:
        for field in self._info.schema.fields:
            if field.name == name:
                return field
        raise InvalidArgument(f"no field {name!r}; this table has {', '.join(self.fields)}")

    def _pieces(
        self, selection: Selection, specs: list[pb.FieldSpec]
    ) -> Iterator[tuple[int, Selection]]:
        """(position, rows) of each request; one for no rows at all, so that errors show."""
        row_bytes = 8 + sum(codec.to_numpy(spec.dtype).itemsize * spec.width for spec in specs)
        most = max(1, min(_PIECE_BYTES // row_bytes, self.request_rows or 1 << 62))
        for start in range(0, max(1, selection.count), most):
            yield start, selection.part(start, min(start + most, selection.count))

    # ------------------------------------------------------------------------------- the rest

    def flush(self) -> int:
        """Make the table durable as it is now; returns the record bytes written.

        Raises StateRolledBack if the daemon has lost what was to be made durable meanwhile.
        """
        return self._session.flush([self.id])

    def clone(self, name: str | None = None, label: str = "") -> Table:
        """A copy-on-write copy, as of now. Without a name it ends with this session."""
        return self._session.clone_table(self, name=name, label=label)

    def drop(self, force: bool = False) -> None:
        """Drop the table and its records. `force`: even if another session uses it."""
        self._session.drop_tables([self.id], force=force)


def _check_distinct(ids: np.ndarray) -> None:
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise InvalidArgument(f"row {twice[0]} stands twice in rows: scatter needs distinct ones")


def _unpickle(address: str | None, run: str | None, info: bytes) -> Table:
    from momentd._session import Session  # the two know each other

    return Table(Session.shared(address, run), pb.TableInfo.FromString(info))


__all__ = ["Table", "UpdateResult"]
