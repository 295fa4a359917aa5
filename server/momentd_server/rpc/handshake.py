"""Hello: the protocol that both ends speak, and what the daemon says of itself."""

from __future__ import annotations

from momentd_server.config import VERSION, ServeConfig
from momentd_server.engine.api import EngineInfo
from momentd_wire import limits
from momentd_wire.errors import Incompatible
from momentd_wire.v1 import momentd_pb2 as pb


def agree(request: pb.HelloRequest) -> int:
    """The highest protocol version that both speak."""
    low, high = request.protocol_min, request.protocol_max
    if high < low or high < limits.PROTOCOL_MIN or low > limits.PROTOCOL_MAX:
        raise Incompatible(
            f"the client speaks protocol versions {low}..{high}, this daemon (momentd {VERSION}) "
            f"{limits.PROTOCOL_MIN}..{limits.PROTOCOL_MAX}: install the same momentd version at "
            "both ends",
            client=f"{low}..{high}",
            server=f"{limits.PROTOCOL_MIN}..{limits.PROTOCOL_MAX}",
        )
    missing = sorted(set(request.required_features) - limits.FEATURES)
    if missing:
        raise Incompatible(
            f"the client needs {', '.join(missing)[:200]}, which this daemon (momentd {VERSION}) "
            f"does not have; it has {', '.join(sorted(limits.FEATURES))}: update the daemon"
        )
    return min(high, limits.PROTOCOL_MAX)


def reply(protocol: int, info: EngineInfo, config: ServeConfig, pid: int) -> pb.HelloReply:
    """The answer to a hello, before a session is opened."""
    return pb.HelloReply(
        protocol=protocol,
        server_version=VERSION,
        features=sorted(limits.FEATURES),
        limits=pb.Limits(
            packet_bytes=limits.PACKET_BYTES,
            piece_bytes=limits.PIECE_BYTES,
            arena_bytes=config.arena_bytes,
            request_record_bytes=info.request_record_bytes,
            request_tables=limits.REQUEST_TABLES,
        ),
        store_id=info.store_id,
        engine_epoch=info.engine_epoch,
        pid=pid,
        data_dir=info.data_dir,
        cache_bytes=info.cache_bytes,
        auto_started=config.auto_started,
    )
