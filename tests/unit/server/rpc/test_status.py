"""Every reason has a status, and errors come back as what they were."""

import pytest

from momentd_server.rpc.status import STATUS
from momentd_wire import errors
from momentd_wire.v1 import momentd_pb2 as pb


def test_every_reason_has_a_status():
    assert set(STATUS) == set(pb.Reason.values()) - {pb.REASON_UNSPECIFIED}


@pytest.mark.parametrize("reason", sorted(STATUS))
def test_an_error_survives_the_wire(reason):
    sent = pb.Error(reason=reason, message="what", details={"row": "1"})
    error = errors.from_wire(sent)
    assert type(error).reason == reason
    assert errors.to_wire(error) == sent
