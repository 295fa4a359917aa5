"""Builds the daemon, serves until a signal, a `Stop` call or long idleness, and stops in order.

Starting: address locked, store opened, kernels ready, gRPC bound, and only then the socket that
clients look for appears. Stopping goes the other way round.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from momentd_server.config import VERSION, ServeConfig
from momentd_server.engine.api import Engine
from momentd_server.engine.arenas import ArenaBudget
from momentd_server.keeper import Kept, KeptByKeeper
from momentd_server.obs import logs
from momentd_server.obs.logs import log
from momentd_server.rpc.dispatcher import Dispatcher
from momentd_server.rpc.grpc_plane import GrpcPlane
from momentd_server.rpc.local import LocalPlane
from momentd_server.rpc.socket_path import SocketPath
from momentd_server.rpc.stats import StatsSource
from momentd_wire.errors import CorruptRecord, Incompatible, MomentdError, StorageFailed
from momentd_wire.units import format_bytes

HOUSEKEEPING_S: Final = 1.0
# Names of snapshots that `--snapshot-every` makes begin so.
PERIODIC: Final = "auto-"
# A job of the lane takes milliseconds.
HANG_S: Final = 30.0
# Exit code of a daemon whose orderly stop did not end in time, or was cut short.
EXIT_NOT_CLEAN: Final = 3
# Of one that met a failed sync: starting it again by itself would hide that from people.
EXIT_STORAGE_FAILED: Final = 4
# Of an engine whose code is not its keeper's: no other one can take its memory over.
EXIT_OTHER_CODE: Final = 5


class Daemon:
    """All parts of one daemon over an engine. Made serving by `open`; used by tests as well."""

    def __init__(
        self, config: ServeConfig, engine: Engine, where: SocketPath, kept: Kept | None = None
    ) -> None:
        """Binds what can fail. Raises DaemonUnavailable or InvalidArgument."""
        self._config = config
        self._engine = engine
        self._stop_asked = threading.Event()
        self._discard = False
        self._closed = threading.Event()
        self._used_at_s = time.monotonic()
        kept = kept or Kept()
        budget = ArenaBudget(
            session_bytes=config.arena_bytes, total_bytes=config.arenas_total_bytes, kept=kept
        )
        for session in engine.sessions.all():
            budget.adopt(session)
        stats = StatsSource(kept, addresses=self.addresses, arena_bytes=lambda: budget.used_bytes)
        self._dispatcher = Dispatcher(engine, config, stats=stats, request_stop=self.ask_stop)
        self._local = LocalPlane(
            self._dispatcher,
            where,
            budget,
            kept,
            allow_uids=config.allow_uids,
            max_connections=config.max_sessions,
        )
        self._grpc = GrpcPlane(self._dispatcher, engine.sessions, config, socket=where.grpc_path)
        self._housekeeper = threading.Thread(
            target=self._keep_house, name="momentd-housekeeping", daemon=True
        )

        self._photographer = None
        if config.snapshot_every_s:
            self._photographer = threading.Thread(
                target=self._snapshot_runs, name="momentd-snapshots", daemon=True
            )

    @property
    def addresses(self) -> list[str]:
        """Every address of this daemon, as clients write them."""
        config = self._config
        return [
            str(config.address), str(config.address.control), *(str(at) for at in config.listen),
        ]  # fmt: skip

    @property
    def ports(self) -> list[int]:
        """Ports of the TCP listeners, in the order of the configuration."""
        return list(self._grpc.ports)

    def open(self) -> None:
        """Serve on both planes; the local socket appears last."""
        self._grpc.open()
        self._local.open()
        self._housekeeper.start()
        if self._photographer is not None:
            self._photographer.start()

    def ask_stop(self, discard: bool = False) -> None:
        """Let `wait` return. Called by signal handlers and by the Stop call."""
        self._discard = self._discard or discard
        self._stop_asked.set()

    def wait(self) -> None:
        """Return when a stop is asked for."""
        self._stop_asked.wait()

    def close(self) -> bool:
        """Stop in order; sessions and everything dirty are made durable unless discarded.

        Requests in work have half of the configured time. Returns whether all of them ended.
        """
        # The other half of the time is for writing what is dirty.
        deadline_s = time.monotonic() + self._config.stop_timeout_s / 2
        self._dispatcher.drain()
        self._closed.set()
        # A Stop call is answered by a request in work: the planes close behind it.
        clean = self._local.close(deadline_s)
        clean = self._grpc.close(deadline_s) and clean
        for thread in (self._housekeeper, self._photographer):
            if thread is not None and thread.is_alive():
                thread.join()
        self._engine.stop(discard=self._discard)
        return clean

    def _keep_house(self) -> None:
        while not self._closed.wait(HOUSEKEEPING_S):
            try:
                if self._engine.failure is not None:
                    self._grpc.say_failed()
                self._end_expired()
                self._grpc.transfers.sweep()
                self._engine.tidy()
                self._stop_if_idle()
            except Exception as error:  # noqa: BLE001  # the next round may do better
                log.error("housekeeping_failed", cause=error)

    def _snapshot_runs(self) -> None:
        """Snapshots of all runs from time to time; of those made here old ones are deleted."""
        while not self._closed.wait(self._config.snapshot_every_s):
            for run in {table.run for table in self._engine.list_tables()}:
                try:
                    self._snapshot_run(run)
                except MomentdError as error:
                    # A run that has ended, a full disk: the next round may do better.
                    log.warning("snapshot_failed", run=run, reason=error.message)
                if self._closed.is_set():
                    return

    def _snapshot_run(self, run: str) -> None:
        now = {(table.id, table.update_number) for table in self._engine.list_tables(run)}
        for each in self._engine.list_snapshots(run):
            if now == {(t.table, t.manifest.update_number) for t in each.record.tables}:
                return
        name = f"{PERIODIC}{run[:64]}-{int(time.time())}"
        self._engine.create_snapshot([], run=run, name=name, pinned=False)
        made = [
            each.record.name
            for each in self._engine.list_snapshots(run)
            if each.record.name.startswith(PERIODIC) and not each.record.pinned
        ]
        old = made[: -self._config.snapshots_kept]
        if old:
            self._engine.delete_snapshots(old)

    def _end_expired(self) -> None:
        for session in self._engine.sessions.expired():
            log.info("session_expired", session=session.short_id, pid=session.pid)
            self._dispatcher.end_session(session)

    def _stop_if_idle(self) -> None:
        """A daemon that a client started ends some time after its last user has gone."""
        if not self._config.auto_started:
            return
        now_s = time.monotonic()
        if len(self._engine.sessions) or any(t.name is None for t in self._engine.list_tables()):
            self._used_at_s = now_s
        elif now_s - self._used_at_s > self._config.idle_exit_s:
            log.info("idle", idle_s=self._config.idle_exit_s)
            self.ask_stop()


@dataclass(frozen=True, slots=True)
class Report:
    """Says what the daemon does: one line on stdout when it serves, the rest on stderr."""

    as_json: bool = False

    def ready(self, daemon: Daemon, config: ServeConfig, kept: Kept, started_s: float) -> None:
        if kept.restarts:
            log.warning(
                "serving_again", restarts=kept.restarts,
                seconds=round(time.monotonic() - started_s, 3),
            )  # fmt: skip
            return
        facts = {
            "event": "serving",
            "version": VERSION,
            "pid": kept.pid,
            "cache_bytes": config.cache_bytes,
            "data_dir": str(config.data_dir),
            "addresses": daemon.addresses,
            "seconds": round(time.monotonic() - started_s, 3),
        }
        text = (
            f"momentd {VERSION} serves at {config.address} (pid {kept.pid}, cache "
            f"{format_bytes(config.cache_bytes)}, data {config.data_dir})"
        )
        self._print(json.dumps(facts) if self.as_json else text, sys.stdout)

    def progress(self, text: str) -> None:
        self._print(text, sys.stderr)

    def _print(self, text: str, stream: object) -> None:
        try:
            print(text, file=stream, flush=True)  # type: ignore[arg-type]
        except OSError:
            return


class Signals:
    """SIGTERM, SIGINT, SIGHUP: the first asks for an orderly stop, the second ends the process."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._count = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` wants it
            signal.signal(signal.SIGHUP, self._received)

    def __call__(self, stop: Callable[[], None]) -> None:
        """Where to send the first signal; at once if it has come already."""
        self._stop = stop
        if self._count:
            stop()

    def _received(self, number: int, _: FrameType | None) -> None:
        self._count += 1
        name = signal.Signals(number).name
        if self._count > 1:
            # The store is safe at any instant; what is dirty is lost, as by a kill.
            os.write(2, f"momentd: second {name}: stopping at once\n".encode())
            os._exit(128 + number)
        os.write(2, f"momentd: {name}: stopping in order, a second one stops at once\n".encode())
        if self._stop is not None:
            self._stop()


def start_engine(config: ServeConfig, report: Report, kept: Kept) -> Engine:
    """Open the store with its kernels ready. Says when a compiler has to run first."""
    from momentd_server import jit
    from momentd_server.engine.engine import LocalEngine

    def warm_up() -> None:
        if jit.is_cached():
            jit.warm_up()
            return
        report.progress(
            "momentd: first start with this version on this machine: compiling kernels, about 20 s"
        )
        jit.warm_up(lambda name, done, total: report.progress(f"momentd: kernels {done}/{total}"))

    return LocalEngine.start(config, warm_up, kept)


def serve(
    config: ServeConfig,
    *,
    as_json: bool = False,
    start: Callable[[ServeConfig, Report, Kept], Engine] = start_engine,
    kept: Kept | None = None,
) -> int:
    """Run an engine in the calling (main) thread until it is told to stop; returns the exit code.

    `kept`: what an earlier engine of the same keeper has left. 0: stopped in order. 1: could not
    start. 3: requests in work did not end in time. 4: the disk failed: nothing was made durable
    since.
    """
    started_s = time.monotonic()
    logs.configure()
    report, signals, kept = Report(as_json), Signals(), kept or Kept()
    path = Path(config.address.target)
    try:
        where = SocketPath(
            path, shared=bool(config.allow_uids), lock_fd=kept.take("address"), pid=kept.pid
        )
    except MomentdError as error:
        report.progress(f"momentd: {error}")
        return 1
    kept.keep("address", where.lock_fd)
    try:
        engine = start(config, report, kept)
        try:
            return _run(
                config, engine, where, signals, kept,
                lambda daemon: report.ready(daemon, config, kept, started_s),
            )  # fmt: skip
        finally:
            engine.close()
    except MomentdError as error:
        report.progress(f"momentd: {error}")
        failed = isinstance(error, StorageFailed) and not isinstance(error, CorruptRecord)
        return EXIT_STORAGE_FAILED if failed else 1
    finally:
        where.close()


def _run(
    config: ServeConfig,
    engine: Engine,
    where: SocketPath,
    signals: Signals,
    kept: Kept,
    ready: Callable[[Daemon], None],
) -> int:
    try:
        daemon = Daemon(config, engine, where, kept)
    except BaseException:
        engine.stop()
        raise
    if config.token_in_the_clear:
        log.warning("token_without_tls", hint="anybody on the network can read it: add --tls-cert")
    try:
        daemon.open()
    except BaseException:
        daemon.close()
        raise
    signals(daemon.ask_stop)
    kept.watch(daemon.ask_stop)
    if kept.stop_asked:
        daemon.ask_stop()
    log.info("serving", addresses=daemon.addresses, cache_bytes=config.cache_bytes, version=VERSION)
    ready(daemon)
    kept.serving()
    hangs = HangWatch(engine.progress)
    hangs.start()
    daemon.wait()
    hangs.stop()  # from here on the time for stopping counts
    kept.ending(EXIT_NOT_CLEAN)
    watchdog = _Watchdog(config.stop_timeout_s)
    clean = daemon.close()
    watchdog.cancel()
    if engine.failure is not None:  # and what was dirty was to be discarded
        return EXIT_STORAGE_FAILED
    log.info("stopped", clean=clean)
    return 0 if clean else EXIT_NOT_CLEAN


class HangWatch:
    """Ends an engine whose lane makes no progress: its successor does what was to be done.

    The last word has a timer of the interpreter that needs neither the lane nor the interpreter's
    lock: it prints all stacks and ends the process, unless it is set again in time.
    """

    def __init__(self, progress: Callable[[], int | None], limit_s: float = HANG_S) -> None:
        self._progress = progress
        self._limit_s = limit_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="momentd-hangs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        seen: int | None = None
        while True:
            now = self._progress()
            if now is None or now != seen:
                seen = now
                faulthandler.dump_traceback_later(self._limit_s, exit=True)
            if self._closed.wait(self._limit_s / 10):
                return


class _Watchdog:
    """Ends the process if an orderly stop takes longer than it may."""

    def __init__(self, timeout_s: float) -> None:
        self._timer = threading.Timer(timeout_s, self._expire)
        self._timer.name, self._timer.daemon = "momentd-watchdog", True
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()
        self._timer.join()

    def _expire(self) -> None:
        log.error("stop_timed_out", hint="what was dirty is lost; raise --stop-timeout")
        os._exit(EXIT_NOT_CLEAN)


def run_engine(channel: int, lifeline: int) -> int:
    """An engine, in the process that the keeper has forked for it; returns its exit code."""
    try:
        kept = KeptByKeeper(channel, lifeline)
    except Incompatible as error:
        Report().progress(f"momentd: {error}")
        return EXIT_OTHER_CODE
    code = serve(kept.config, as_json=kept.as_json, kept=kept)
    # What could not be started again is tried again: what it failed for may pass.
    if code != 1 or not kept.restarts:
        kept.ending(code)
    return code
