"""R85: a server that takes frequent pings of idle connections for an attack cuts clients off."""

import socket

from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import make_config, serving

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
PINGS = 20


def frame(kind, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


def frames(sock):
    """(kind, flags, payload) of each frame until the server hangs up."""
    with sock.makefile("rb") as stream:
        while head := stream.read(9):
            yield head[3], head[4], stream.read(int.from_bytes(head[:3], "big"))


def test_a_connection_that_only_pings_is_not_cut_off(tmp_path):
    with serving(make_config(tmp_path), NumpyEngine()), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(f"{tmp_path}/m.sock.grpc")
        sock.sendall(PREFACE + frame(SETTINGS))
        for number in range(PINGS):
            sock.sendall(frame(PING, number.to_bytes(8, "big")))
        answered = 0
        for kind, flags, payload in frames(sock):
            assert kind != GOAWAY, payload
            answered += kind == PING and flags & ACK
            if answered == PINGS:
                break
        assert answered == PINGS
