"""The gRPC plane: ports, TLS, health, reflection, and the order of starting and stopping."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from momentd_server.config import ServeConfig, Tls
from momentd_server.engine.sessions import Sessions
from momentd_server.rpc.dispatcher import Dispatcher
from momentd_server.rpc.service import Service
from momentd_server.rpc.status import Boundary
from momentd_server.rpc.transfer import Transfers
from momentd_wire import limits
from momentd_wire.errors import DaemonUnavailable, InvalidArgument
from momentd_wire.v1 import momentd_pb2 as pb
from momentd_wire.v1 import momentd_pb2_grpc as pb_grpc

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Momentd"].full_name
# Each attached session and each watcher of stats holds a thread; these are for everything else.
CALL_THREADS: Final = 64
# A piece with its framing, and heads with many tables.
MESSAGE_BYTES: Final = limits.PIECE_BYTES + (1 << 18)

_OPTIONS: Final[list[tuple[str, object]]] = [
    # Two daemons on one port must be an error, not a lottery.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", 64 << 20),
    # Clients may ping an idle connection every 10 s, as ours do over TCP.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
]


class GrpcPlane:
    """Serves from the moment `open` returns until `close`."""

    def __init__(
        self, dispatcher: Dispatcher, sessions: Sessions, config: ServeConfig, *, socket: Path
    ) -> None:
        """Binds all ports. Raises InvalidArgument (a port that cannot be bound, TLS files)."""
        self.transfers: Final = Transfers(config.grpc_bytes)
        self._socket = socket
        self._service = Service(dispatcher, sessions, self.transfers, uid=os.geteuid())
        self._health = health.HealthServicer()
        workers = config.max_sessions + CALL_THREADS
        self._server = grpc.server(
            ThreadPoolExecutor(workers, thread_name_prefix="momentd-grpc"),
            interceptors=[Boundary(config.token)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=workers,
        )
        pb_grpc.add_MomentdServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.ports: Final = self._bind(config)

    def open(self) -> None:
        """Serve."""
        # Connections are taken from here on; the mode was set when the socket was bound.
        self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def say_failed(self) -> None:
        """Health is "not serving" from now on; calls are answered all the same."""
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    def close(self, deadline_s: float) -> bool:
        """Say "not serving", end streams, finish calls in work until `deadline_s` (monotonic).

        Returns whether all calls had ended in time; the others are cancelled.
        """
        self._health.enter_graceful_shutdown()
        self._service.stop_streams()
        grace_s = max(0.0, deadline_s - time.monotonic())
        # `stop` waits for the calls by itself; the event is set when the last one has ended.
        stopped = self._server.stop(grace_s)
        stopped.wait(grace_s + 1.0)
        return time.monotonic() <= deadline_s

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE):
            self._health.set(name, status)

    def _bind(self, config: ServeConfig) -> Sequence[int]:
        """Bind the Unix socket and the TCP listeners; returns the ports of the latter."""
        # gRPC binds within this call and asks for no mode: the umask is the only way to have the
        # socket private from its first instant. No other thread of the daemon makes files yet.
        umask = os.umask(0o177)
        try:
            self._add_port(f"unix:{self._socket}", None)
        finally:
            os.umask(umask)
        return [self._add_port(at.target, config.tls) for at in config.listen]

    def _add_port(self, target: str, tls: Tls | None) -> int:
        try:
            if tls is None:
                port = self._server.add_insecure_port(target)
            else:
                port = self._server.add_secure_port(target, _credentials(tls))
        except RuntimeError as error:
            raise DaemonUnavailable(
                f"cannot listen on {target}: {error}; is another program using it?"
            ) from error
        if not port:
            raise DaemonUnavailable(f"cannot listen on {target}: is another program using it?")
        return port


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    try:
        key, certificate = tls.key.read_bytes(), tls.certificate.read_bytes()
        client_ca = tls.client_ca.read_bytes() if tls.client_ca else None
    except OSError as error:
        raise InvalidArgument(f"TLS file {error.filename}: {error.strerror}") from error
    return grpc.ssl_server_credentials(
        [(key, certificate)],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )
