"""A daemon's control plane in this process: the real service definition over canned state."""

from __future__ import annotations

import time
from concurrent import futures

import grpc
import pytest
from click.testing import CliRunner

from momentd_server.cli.root import momentd
from momentd_wire import errors, limits
from momentd_wire.v1 import momentd_pb2 as pb
from momentd_wire.v1 import momentd_pb2_grpc as rpc

MIB = 1 << 20


class FakeDaemon(rpc.MomentdServicer):
    """Keeps tables and sessions in lists that a test fills; answers as the protocol says."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.totals = pb.Totals(
            pid=2**22 + 1,
            server_version="9.9",
            uptime_s=3725,
            state="serving",
            data_dir="/data",
            store_id=bytes(range(16)),
            cache_bytes=512 * MIB,
            cache_used_bytes=128 * MIB,
            frames=1000,
            frames_dirty=250,
            drain_s=1.5,
        )
        self.tables: list[pb.TableStats] = []
        self.sessions: list[pb.SessionStats] = []
        self.delay_s = 0.0
        self.metadata: dict[str, str | bytes] = {}
        self.ended = 0
        self.stop_requests: list[pb.StopRequest] = []
        self.on_stop = lambda: None

    def add_table(self, number: int, run: str, *, name: str = "", age_s: float = 60.0) -> None:
        field = pb.FieldSpec(name="exp_avg", dtype=pb.D_TYPE_FLOAT32, width=128)
        info = pb.TableInfo(
            table=pb.TableRef(id=number, generation=1),
            name=name,
            label="weight",
            run=run,
            schema=pb.Schema(rows=10_000_000, width=128, fields=[field], rule="sparse_adam"),
            record_bytes=1024,
            step=7,
            created_s=time.time() - age_s,
        )
        self.tables.append(
            pb.TableStats(table=info, rows_touched=1234, disk_bytes=5 * MIB, hits=3, misses=1)
        )

    def add_session(self, pid: int, run: str, tables: list[int]) -> None:
        self.sessions.append(
            pb.SessionStats(
                session="0a1b2c3d", pid=pid, run=run, plane="local", tables=tables, attached=True
            )
        )

    def _stats(self, run: str | None) -> pb.StatsReply:
        tables = [row for row in self.tables if run is None or row.table.run == run]
        return pb.StatsReply(totals=self.totals, tables=tables, sessions=self.sessions)

    def Hello(self, request, context):
        return pb.HelloReply(protocol=1, session=b"s" * 16)

    def End(self, request, context):
        self.ended += 1
        return pb.EndReply()

    def Stats(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        time.sleep(self.delay_s)
        return self._stats(request.run if request.HasField("run") else None)

    def WatchStats(self, request, context):
        for _ in range(1000):
            yield pb.WatchStatsReply(stats=self._stats(None))
            time.sleep(request.interval_s)

    def ListTables(self, request, context):
        run = request.run if request.HasField("run") else None
        return pb.ListTablesReply(tables=[row.table for row in self._stats(run).tables])

    def DropTable(self, request, context):
        if dict(context.invocation_metadata()).get(limits.SESSION_METADATA) != b"s" * 16:
            self._abort(context, errors.SessionNotFound("no session"))
        used = {number for session in self.sessions for number in session.tables}
        doomed = [row for row in self.tables if row.table.run == request.run]
        if not request.force and any(row.table.table.id in used for row in doomed):
            self._abort(context, errors.TableInUse("pid 41 uses table 1: end it", table=1))
        self.tables = [row for row in self.tables if row not in doomed]
        return pb.DropTableReply(dropped=len(doomed))

    def Stop(self, request, context):
        self.stop_requests.append(request)
        self.on_stop()
        return pb.StopReply(drain_s=1.5)

    def _abort(self, context, error):
        wire = errors.to_wire(error).SerializeToString()
        context.set_trailing_metadata(((limits.ERROR_METADATA, wire),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)


@pytest.fixture
def daemon(tmp_path):
    path = tmp_path / "momentd.sock"
    fake = FakeDaemon(f"unix:{path}")
    server = grpc.server(futures.ThreadPoolExecutor(4))
    rpc.add_MomentdServicer_to_server(fake, server)
    server.add_insecure_port(f"unix:{path}.grpc")
    server.start()
    fake.on_stop = lambda: server.stop(grace=0.2)
    yield fake
    server.stop(grace=0).wait()


@pytest.fixture
def run(daemon, monkeypatch):
    """Runs a command against the fake daemon and returns click's result."""
    monkeypatch.setenv("MOMENTD_ADDRESS", daemon.address)

    def invoke(*arguments: str, text: str | None = None):
        return CliRunner().invoke(momentd, list(arguments), input=text)

    return invoke
