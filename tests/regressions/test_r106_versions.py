"""R106: client and daemon of different versions. One clear error at connect, not in step 1,000."""

import pytest

from momentd_wire import errors, limits
from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import GrpcClient, LocalClient, make_config, serving


@pytest.mark.parametrize("version", [0, 99])
def test_the_error_names_both_ranges_on_both_planes(tmp_path, version):
    said = {"protocol_min": version, "protocol_max": version}
    texts = []
    with serving(make_config(tmp_path), NumpyEngine()):
        with pytest.raises(errors.Incompatible) as caught:
            LocalClient(tmp_path / "m.sock", **said)
        texts.append(str(caught.value))
        with pytest.raises(errors.Incompatible) as caught:
            GrpcClient(f"unix:{tmp_path}/m.sock.grpc", **said)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    for part in (f"{version}..{version}", f"{limits.PROTOCOL_MIN}..{limits.PROTOCOL_MAX}"):
        assert part in texts[0]


def test_a_client_that_is_newer_by_a_feature_works_without_it(tmp_path):
    with (
        serving(make_config(tmp_path), NumpyEngine()),
        LocalClient(tmp_path / "m.sock", features=["mask", "future"]) as client,
    ):
        assert set(client.hello.features) == set(limits.FEATURES)
        assert client.open_table().table.id
