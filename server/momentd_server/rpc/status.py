"""The one place where errors become gRPC statuses, and where callers over TCP show their token."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from momentd_server.obs.logs import log
from momentd_wire import errors, limits
from momentd_wire.errors import Cancelled, MomentdError, PermissionDenied
from momentd_wire.v1 import momentd_pb2 as pb

# Metadata of a call is limited to 8 KiB; the message is in it twice.
_MESSAGE_CHARACTERS: Final = 1500

STATUS: Final[dict[int, grpc.StatusCode]] = {
    pb.REASON_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    pb.REASON_ROW_OUT_OF_RANGE: grpc.StatusCode.OUT_OF_RANGE,
    pb.REASON_TABLE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    pb.REASON_SCHEMA_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REASON_TABLE_IN_USE: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REASON_CACHE_TOO_SMALL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.REASON_OUT_OF_MEMORY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.REASON_OUT_OF_SPACE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.REASON_STORAGE_FAILED: grpc.StatusCode.DATA_LOSS,
    pb.REASON_CORRUPT: grpc.StatusCode.DATA_LOSS,
    pb.REASON_STATE_ROLLED_BACK: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REASON_OUT_OF_SEQUENCE: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REASON_SESSION_NOT_FOUND: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REASON_INCOMPATIBLE: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REASON_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    pb.REASON_PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    pb.REASON_LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.REASON_SNAPSHOT_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    pb.REASON_REPLICA_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    pb.REASON_NOT_IMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    pb.REASON_INTERNAL: grpc.StatusCode.INTERNAL,
    pb.REASON_CANCELLED: grpc.StatusCode.CANCELLED,
}

_UNGUARDED: Final = "/grpc.health.v1.Health/"
_Behavior = Callable[[Any, grpc.ServicerContext], Any]


class Boundary(grpc.ServerInterceptor):
    """Wraps every method: token first, then the method, then its error as a status."""

    def __init__(self, token: str | None) -> None:
        self._token = token.encode() if token is not None else None

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler: Any = continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_UNGUARDED):
            return handler
        make, behavior = _parts(handler)
        wrapped = self._stream(behavior) if handler.response_streaming else self._unary(behavior)
        return make(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _unary(self, behavior: _Behavior) -> _Behavior:
        def call(request: object, context: grpc.ServicerContext) -> object:
            try:
                self._check_token(context, request)
                return behavior(request, context)
            except Exception as error:  # noqa: BLE001  # everything becomes a status
                _abort(context, error)

        return call

    def _stream(self, behavior: _Behavior) -> _Behavior:
        def call(request: object, context: grpc.ServicerContext) -> Iterator[object]:
            try:
                self._check_token(context, request)
                yield from behavior(request, context)
            except Exception as error:  # noqa: BLE001  # everything becomes a status
                _abort(context, error)

        return call

    def _check_token(self, context: grpc.ServicerContext, request: object) -> None:
        """Callers over TCP must know the token, if there is one. A Unix socket has its mode."""
        if self._token is None or context.peer().startswith("unix:"):
            return
        if isinstance(request, pb.HelloRequest) and hmac.compare_digest(
            request.token.encode(), self._token
        ):
            return
        for key, value in context.invocation_metadata():
            if key == limits.TOKEN_METADATA:
                shown = value.encode() if isinstance(value, str) else value
                if hmac.compare_digest(shown, self._token):
                    return
        raise PermissionDenied(
            f"this daemon asks for a token over TCP: send it as metadata {limits.TOKEN_METADATA!r} "
            "($MOMENTD_TOKEN)"
        )


def _parts(handler: Any) -> tuple[Callable[..., grpc.RpcMethodHandler], _Behavior]:
    """How to rebuild a handler of this kind, and what it does."""
    kinds: dict[tuple[bool, bool], tuple[Callable[..., grpc.RpcMethodHandler], _Behavior]] = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }
    return kinds[handler.request_streaming, handler.response_streaming]


def _abort(context: grpc.ServicerContext, error: Exception) -> None:
    if isinstance(error, grpc.RpcError):
        # What reading the next piece raises when the caller has gone.
        error = Cancelled("the caller gave up, or its deadline passed, before anything changed")
    if not isinstance(error, MomentdError):
        log.error("request_failed", cause=error)
    wire = errors.to_wire(error)
    wire.message = wire.message[:_MESSAGE_CHARACTERS]
    context.set_trailing_metadata(((limits.ERROR_METADATA, wire.SerializeToString()),))
    code = STATUS.get(wire.reason, grpc.StatusCode.UNKNOWN)
    context.abort(code, wire.message)
