"""A handle of one table: rows in, rows out, as numpy arrays or torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from momentd_wire.v1 import momentd_pb2 as pb


class Table:
    """A table of a daemon. Cheap to make, safe to share between threads, may be pickled."""

    id: int
    generation: int
    name: str | None
    label: str
    run: str
    rows: int
    width: int
    """Elements of one row of the parameter; also `dim`."""
    rule: str
    record_bytes: int
    request_rows: int
    """Most rows of one update."""
    step: int
    """The table's step counter as of the last reply this handle saw; see `refresh`."""
    update_number: int

    @property
    def dim(self) -> int:
        return self.width

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the record's fields, in record order."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype:
        """Element type of the state."""
        raise NotImplementedError

    @property
    def schema(self) -> pb.Schema:
        raise NotImplementedError

    def refresh(self) -> Table:
        """Ask the daemon for `step` and `update_number`; returns self."""
        raise NotImplementedError

    def update(
        self,
        rows: Any,
        grads: Any,
        *,
        mask: Any = None,
        step: int | None = None,
        **hyper: Any,
    ) -> Any:
        """Gather, rule, write back: one atomic update. Returns an UpdateResult (own memory)."""
        raise NotImplementedError

    def gather(self, rows: Any = None, fields: str | Sequence[str] | None = None) -> Any:
        """Read fields of rows. rows: ids, a `range`/`slice` of step 1, or None for all.

        One field (a name, or a list of one) gives its array (n, width); several, or None for all,
        give a dict of name -> array. Larger requests than `request_rows` go in pieces.
        """
        raise NotImplementedError

    def scatter(self, rows: Any = None, *, step: int | None = None, **values: Any) -> None:
        """Write fields of rows as they are: `table.scatter(rows, exp_avg=array)`."""
        raise NotImplementedError

    def prefetch(self, rows: Any) -> int:
        """Start reading rows ahead; returns how many will be read."""
        raise NotImplementedError

    def flush(self) -> int:
        """Make the table durable as it is now; returns the record bytes written."""
        raise NotImplementedError

    def clone(self, name: str | None = None, label: str = "") -> Table:
        """A copy-on-write copy, as of now."""
        raise NotImplementedError

    def drop(self, force: bool = False) -> None:
        """Drop the table and its records."""
        raise NotImplementedError
