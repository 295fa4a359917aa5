"""One connection of this process to a daemon: opened lazily, resumed after a daemon restart."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from momentd._stream import Stream
from momentd.table import Table
from momentd_wire.v1 import momentd_pb2 as pb


class Session:
    """A session of this process. Creating one does nothing; the first call opens it.

    Thread-safe. A forked child that uses it gets a session of its own.
    """

    address: str | None
    """As asked for; None: found by `momentd._discovery` on first use."""
    run: str | None

    @classmethod
    def shared(cls, address: str | None = None, run: str | None = None) -> Session:
        """The session of this process for an address and a run; it lives while somebody holds it."""
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        """Whether a connection exists now (in this process)."""
        raise NotImplementedError

    @property
    def where(self) -> str:
        """The daemon's address if open, else the one asked for, else "(not connected)"."""
        raise NotImplementedError

    @property
    def hello(self) -> pb.HelloReply:
        """What the daemon said of itself. Opens the session."""
        raise NotImplementedError

    def open_table(
        self,
        schema: pb.Schema,
        *,
        name: str | None = None,
        label: str = "",
        mode: pb.OpenTableRequest.Mode = pb.OpenTableRequest.MODE_OPEN_OR_CREATE,
    ) -> Table:
        """Open or create a table. Without a name it belongs to this session and ends with it."""
        raise NotImplementedError

    def clone_table(self, table: Table, *, name: str | None = None, label: str = "") -> Table:
        """A copy-on-write copy of a table, as of now."""
        raise NotImplementedError

    def get_table(self, *, id: int | None = None, name: str | None = None) -> Table:
        """A handle of an existing table. Raises TableNotFound."""
        raise NotImplementedError

    def list_tables(self, run: str | None = None) -> list[Table]:
        """Handles of all tables, or of one run's."""
        raise NotImplementedError

    def drop_tables(
        self, ids: Iterable[int] = (), *, run: str | None = None, force: bool = False
    ) -> int:
        """Drop tables (all or none); returns how many."""
        raise NotImplementedError

    def stream(self) -> Stream:
        """A new stream; opens nothing."""
        raise NotImplementedError

    def on_arena(
        self,
        mapped: Callable[[int, int], None],
        unmapped: Callable[[int, int], None] | None = None,
    ) -> None:
        """Call `mapped(address, nbytes)` for each arena, existing and future (local plane only).

        `unmapped` is called before an arena's memory goes away. For registering with CUDA.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the session: its unnamed tables are dropped. It opens again on next use."""
        raise NotImplementedError
