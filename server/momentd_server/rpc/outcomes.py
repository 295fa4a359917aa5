"""Identity of a request, and the stored outcome as a repeated request gets it."""

from __future__ import annotations

import copy
import hashlib

from google.protobuf.message import Message

from momentd_server.engine.sessions import LOST, Outcome
from momentd_wire.errors import StateRolledBack
from momentd_wire.v1 import momentd_pb2 as pb


def fingerprint(call: Message, content: bytes) -> bytes:
    """Identity of a request's content, the same in every process and every arena."""
    if isinstance(call, pb.UpdateRequest | pb.ScatterRequest):
        call = _without_places(call)
    digest = hashlib.blake2b(call.SerializeToString(deterministic=True), digest_size=16)
    digest.update(content)
    return digest.digest()


def _without_places(
    call: pb.UpdateRequest | pb.ScatterRequest,
) -> pb.UpdateRequest | pb.ScatterRequest:
    """A copy that says how long its arrays are, but not where.

    After a restart of the daemon a request is repeated from a new arena.
    """
    plain = copy.deepcopy(call)
    parts = plain.tables if isinstance(plain, pb.UpdateRequest) else [plain]
    for part in parts:
        if isinstance(part, pb.TableUpdate):
            bulks = [part.row_ids, part.grads, part.mask, part.weights]
            for name in ("result_rows", "result_values", "result_factors"):
                part.ClearField(name)
        else:
            bulks = [part.row_ids, *part.values]
        for bulk in bulks:
            if bulk.HasField("arena"):
                bulk.arena.ClearField("arena")
                bulk.arena.ClearField("offset")
    return plain


def as_repeated(outcome: Outcome) -> Outcome:
    """A stored outcome, marked as such where the reply has a place for it."""
    if outcome.body == LOST:
        raise StateRolledBack(
            "this request was applied before the daemon was restarted, but its answer was too "
            "large to be kept: read the rows again, or resume from a checkpoint"
        )
    reply = pb.Reply.FromString(outcome.body)
    which = reply.WhichOneof("result")
    if which == "update":
        reply.update.repeated_request = True
    elif which == "scatter":
        reply.scatter.repeated_request = True
    return Outcome(reply.SerializeToString(), outcome.bulk)
