"""A gRPC server that sends every message back: python -m benchmarks.echo unix:PATH"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

METHOD = "/momentd.benchmarks.Echo/Echo"
OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
]


class _Echo(grpc.GenericRpcHandler):
    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != METHOD:
            return None
        # Without serializers, messages are the bytes as they came.
        return grpc.stream_stream_rpc_method_handler(_back)


def _back(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    del context
    yield from messages


def run(target: str) -> None:
    """Serve until standard input ends."""
    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    server.add_generic_rpc_handlers((_Echo(),))
    server.add_insecure_port(target)
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(None).wait()


if __name__ == "__main__":
    run(sys.argv[1])
