"""Numbers that both ends must agree on."""

from typing import Final

PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1

# A SEQPACKET message must fit the default socket buffer (212,960 bytes); 64 KiB leaves room for
# several in flight.
PACKET_BYTES: Final = 60 * 1024
# gRPC's default receive limit is 4 MiB; 1 MiB pieces are the fastest size measured in Python.
PIECE_BYTES: Final = 1 << 20
ARENA_ALIGN: Final = 64
ARENA_GRANULE: Final = 2 << 20
REQUEST_TABLES: Final = 256

SESSION_METADATA: Final = "momentd-session-bin"
ERROR_METADATA: Final = "momentd-error-bin"
TOKEN_METADATA: Final = "momentd-token"

# Names of things a peer may or may not know. Every feature of version 1 that a client may ask for.
FEATURES: Final = frozenset({"progress", "mask", "clone", "flush", "prefetch"})
