"""The identity of a request: its content, not the arena it happens to lie in."""

import pytest

from momentd_server.engine.sessions import LOST, Outcome
from momentd_server.rpc.outcomes import as_repeated, fingerprint
from momentd_wire import errors
from momentd_wire.v1 import momentd_pb2 as pb


def request(arena=1, offset=0, lr=0.1, length=64):
    region = pb.Region(arena=arena, offset=offset, length=length)
    table = pb.TableUpdate(
        count=8, sparse_adam=pb.SparseAdamHyper(lr=lr), row_ids=pb.Bulk(arena=region),
        result_values=region,
    )  # fmt: skip
    return pb.UpdateRequest(sequence=pb.Sequence(stream=1, number=2), tables=[table])


def test_another_place_is_the_same_request_and_stays_as_it_was():
    moved = request(arena=9, offset=128)
    assert fingerprint(request(), b"") == fingerprint(moved, b"")
    assert moved == request(arena=9, offset=128)


@pytest.mark.parametrize("other", [request(lr=0.2), request(length=128)])
def test_other_content_is_another_request(other):
    assert fingerprint(request(), b"") != fingerprint(other, b"")


def test_streamed_bytes_are_part_of_the_content():
    assert fingerprint(request(), b"1") != fingerprint(request(), b"2")


def test_a_lost_answer_is_an_error_that_says_the_effect_stays():
    with pytest.raises(errors.StateRolledBack, match="was applied"):
        as_repeated(Outcome(LOST))


def test_a_stored_error_stays_as_it_was():
    body = pb.Reply(error=pb.Error(reason=pb.REASON_OUT_OF_SPACE, message="full"))
    assert as_repeated(Outcome(body.SerializeToString())).body == body.SerializeToString()
