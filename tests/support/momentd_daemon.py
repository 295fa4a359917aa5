"""A daemon in this process that can be stopped and started again over the same engine."""

from __future__ import annotations

from pathlib import Path

from momentd_server.app import Daemon
from momentd_server.engine.sessions import Sessions
from momentd_server.rpc.socket_path import SocketPath
from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import make_config


class RestartableDaemon:
    """`stop` keeps what an orderly stop keeps: tables, and sessions as they are saved."""

    def __init__(self, path: Path, **config) -> None:
        self.config = make_config(path, **config)
        self.engine = NumpyEngine()
        self.daemon: Daemon | None = None
        self._where: SocketPath | None = None

    @property
    def local(self) -> str:
        return str(self.config.address)

    @property
    def grpc(self) -> str:
        return str(self.config.address.control)

    def start(self) -> None:
        self._where = SocketPath(Path(self.config.address.target), shared=False)
        self.daemon = Daemon(self.config, self.engine, self._where)
        self.daemon.open()

    def stop(self) -> None:
        if self.daemon is None:
            return
        assert self.daemon.close(), "requests in work did not end"
        assert self._where is not None
        self._where.close()
        self.daemon = None
        saved = self.engine.sessions.save()
        self.engine.stopped = None
        self.engine.sessions = Sessions(max_sessions=256)
        self.engine.sessions.restore(saved)

    def forget_sessions(self) -> None:
        """As after a kill: sessions and their tables are gone."""
        for session in list(self.engine.sessions.all()):
            self.engine.end_session(session.id)
        self.engine.sessions = Sessions(max_sessions=256)
