"""The error tree: one class per reason of the wire. `momentd.errors` re-exports it.

MomentdError (RuntimeError)
 +- InvalidArgument            a malformed request (also a ValueError)
 |   +- RowOutOfRange          a row id outside [0, rows) (also an IndexError)
 +- TableNotFound
 +- SchemaMismatch             a named table exists with another shape, dtype or rule
 +- TableInUse
 +- CacheTooSmall              the request's records exceed a quarter of the cache
 +- OutOfMemory                12 bytes a row, or an arena, do not fit machine or cgroup
 +- OutOfSpace                 the disk is full; nothing is lost and nothing half applied
 +- StorageFailed              a disk error
 |   +- CorruptRecord          a record does not match its check
 +- StateRolledBack            the daemon's state is older than the caller's
 +- OutOfSequence
 +- SessionNotFound
 +- Incompatible               client and daemon share no protocol version
 +- DaemonUnavailable          nobody answers, or the daemon is starting or stopping
 +- PermissionDenied
 +- LimitExceeded
 +- SnapshotNotFound
 +- ReplicaMismatch
 +- UnsupportedFeature         a rule, field or option that the daemon does not implement
 +- Cancelled                  given up before anything was changed
 +- InternalError              a fault of the daemon itself
"""

from __future__ import annotations

from typing import ClassVar

from momentd_wire.v1 import momentd_pb2 as pb


class MomentdError(RuntimeError):
    """Base of everything momentd raises on purpose.

    `details` holds machine-readable particulars as strings, e.g. ``{"row": "10"}``.
    """

    reason: ClassVar[pb.Reason] = pb.REASON_INTERNAL

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = {key: str(value) for key, value in details.items()}

    def __reduce__(self) -> tuple[object, ...]:
        # BaseException pickles by args alone, which would lose the details.
        return _rebuild, (type(self), self.message, self.details)


def _rebuild(cls: type[MomentdError], message: str, details: dict[str, str]) -> MomentdError:
    return cls(message, **details)


class InvalidArgument(MomentdError, ValueError):
    reason = pb.REASON_INVALID_ARGUMENT


class RowOutOfRange(InvalidArgument, IndexError):
    reason = pb.REASON_ROW_OUT_OF_RANGE


class TableNotFound(MomentdError):
    reason = pb.REASON_TABLE_NOT_FOUND


class SchemaMismatch(MomentdError):
    reason = pb.REASON_SCHEMA_MISMATCH


class TableInUse(MomentdError):
    reason = pb.REASON_TABLE_IN_USE


class CacheTooSmall(MomentdError):
    reason = pb.REASON_CACHE_TOO_SMALL


class OutOfMemory(MomentdError):
    reason = pb.REASON_OUT_OF_MEMORY


class OutOfSpace(MomentdError):
    reason = pb.REASON_OUT_OF_SPACE


class StorageFailed(MomentdError):
    reason = pb.REASON_STORAGE_FAILED


class CorruptRecord(StorageFailed):
    reason = pb.REASON_CORRUPT


class StateRolledBack(MomentdError):
    reason = pb.REASON_STATE_ROLLED_BACK


class OutOfSequence(MomentdError):
    reason = pb.REASON_OUT_OF_SEQUENCE


class SessionNotFound(MomentdError):
    reason = pb.REASON_SESSION_NOT_FOUND


class Incompatible(MomentdError):
    reason = pb.REASON_INCOMPATIBLE


class DaemonUnavailable(MomentdError):
    reason = pb.REASON_UNAVAILABLE


class PermissionDenied(MomentdError):
    reason = pb.REASON_PERMISSION_DENIED


class LimitExceeded(MomentdError):
    reason = pb.REASON_LIMIT_EXCEEDED


class SnapshotNotFound(MomentdError):
    reason = pb.REASON_SNAPSHOT_NOT_FOUND


class ReplicaMismatch(MomentdError):
    reason = pb.REASON_REPLICA_MISMATCH


class UnsupportedFeature(MomentdError):
    reason = pb.REASON_NOT_IMPLEMENTED


class Cancelled(MomentdError):
    reason = pb.REASON_CANCELLED


class InternalError(MomentdError):
    reason = pb.REASON_INTERNAL


def _tree(cls: type[MomentdError]) -> list[type[MomentdError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _tree(child))]


# The one table from the wire's reasons to Python's classes.
_BY_REASON: dict[int, type[MomentdError]] = {
    cls.reason: cls for cls in _tree(MomentdError) if cls is not MomentdError
}


def to_wire(error: BaseException) -> pb.Error:
    """The wire form of an error. Anything but a MomentdError is a fault of the daemon."""
    if isinstance(error, MomentdError):
        return pb.Error(reason=error.reason, message=error.message, details=error.details)
    return pb.Error(
        reason=pb.REASON_INTERNAL,
        message=f"the daemon failed: {type(error).__name__}: {error}; its log has the traceback",
    )


def from_wire(error: pb.Error) -> MomentdError:
    """The exception of a wire error; an unknown reason (a newer daemon) is a MomentdError."""
    cls = _BY_REASON.get(error.reason, MomentdError)
    return cls(error.message, **dict(error.details))
