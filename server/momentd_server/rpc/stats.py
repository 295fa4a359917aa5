"""What the daemon tells about itself: the engine's counters, the process, the sessions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from momentd_server.config import VERSION
from momentd_server.engine.api import Engine
from momentd_server.engine.sessions import Session
from momentd_server.keeper import Kept
from momentd_server.obs import process
from momentd_server.rpc import encode
from momentd_wire.v1 import momentd_pb2 as pb


class StatsSource:
    """Counters of the process. `requests` and `errors` are only shown: a lost count is harmless."""

    def __init__(
        self, kept: Kept, *, addresses: Sequence[str], arena_bytes: Callable[[], int]
    ) -> None:
        self.pid = kept.pid
        self._restarts = kept.restarts
        self.requests = 0
        self.errors = 0
        self._addresses = list(addresses)
        self._arena_bytes = arena_bytes
        self._started_s = time.monotonic()

    def collect(self, engine: Engine, run: str | None) -> pb.StatsReply:
        """All counters as of now, or those of one run's tables and sessions."""
        stats = engine.stats(run)
        sessions = [s for s in engine.sessions.all() if run is None or s.run == run]
        totals = encode.engine_totals(stats.totals)
        self._add_process(totals, engine)
        return pb.StatsReply(
            totals=totals,
            tables=[encode.table_stats(table) for table in stats.tables],
            sessions=[_session(session) for session in sessions],
        )

    def _add_process(self, totals: pb.Totals, engine: Engine) -> None:
        info, use = engine.info, process.memory_use()
        totals.MergeFrom(
            pb.Totals(
                pid=self.pid,
                engine_pid=os.getpid(),
                engine_restarts=self._restarts,
                server_version=VERSION,
                uptime_s=time.monotonic() - self._started_s,
                data_dir=info.data_dir,
                store_id=info.store_id,
                engine_epoch=info.engine_epoch,
                addresses=self._addresses,
                arena_bytes=self._arena_bytes(),
                rss_anonymous_bytes=use.anonymous_bytes,
                rss_shared_bytes=use.shared_bytes,
                rss_file_bytes=use.file_bytes,
                process_bytes_written=process.bytes_written(),
                requests=self.requests,
                errors=self.errors,
            )
        )


def _session(session: Session) -> pb.SessionStats:
    return pb.SessionStats(
        session=session.short_id,
        pid=session.pid,
        uid=session.uid,
        run=session.run,
        program=session.program,
        plane=session.plane,
        tables=sorted(session.tables.copy()),
        arena_bytes=session.arena_bytes + session.held_bytes(),
        idle_s=time.monotonic() - session.last_seen_s,
        requests=session.requests,
        attached=session.attached,
    )
