"""How addresses are written, and where a daemon listens by default."""

from pathlib import Path

import pytest

from momentd_wire import addresses
from momentd_wire.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "plane", "kind", "target"),
    [
        ("unix:/run/m.sock", "local", "unix", "/run/m.sock"),
        ("unix:///run/m.sock", "local", "unix", "/run/m.sock"),
        ("grpc+unix:/run/m.sock.grpc", "grpc", "unix", "/run/m.sock.grpc"),
        ("grpc://example:7171", "grpc", "tcp", "example:7171"),
        ("127.0.0.1:7171", "grpc", "tcp", "127.0.0.1:7171"),
        ("[::1]:7171", "grpc", "tcp", "[::1]:7171"),
    ],
)
def test_every_documented_form_is_read(text, plane, kind, target):
    assert addresses.parse(text) == addresses.Address(plane, kind, target)


@pytest.mark.parametrize(
    "text",
    ["", "unix:", "/run/m.sock", "host", "host:", ":7171", "host:port", "::1:7171", "http://h:1"],
)
def test_anything_else_is_refused_quoting_it(text):
    with pytest.raises(InvalidArgument) as caught:
        addresses.parse(text)
    assert repr(text) in str(caught.value)


def test_a_port_beyond_sixteen_bits_is_refused_by_number():
    with pytest.raises(InvalidArgument, match="65536"):
        addresses.parse("host:65536")


def test_a_relative_socket_path_is_refused():
    with pytest.raises(InvalidArgument, match="absolute"):
        addresses.parse("unix:run/m.sock")


def test_a_socket_path_may_be_as_long_as_its_grpc_sibling_fits():
    longest = "/" + "a" * (addresses.SOCKET_PATH_BYTES - 1 - len(addresses.GRPC_SUFFIX))
    assert addresses.parse(f"unix:{longest}").target == longest
    with pytest.raises(InvalidArgument, match=r"108 bytes.*107"):
        addresses.parse(f"unix:{longest}a")


@pytest.mark.parametrize("text", ["unix:/run/m.sock", "grpc+unix:/run/m.grpc", "grpc://h:7171"])
def test_a_printed_address_reads_back_as_itself(text):
    assert str(addresses.parse(text)) == text


def test_the_control_address_of_a_local_plane_is_its_grpc_sibling():
    assert addresses.parse("unix:/run/m.sock").control == addresses.parse(
        "grpc+unix:/run/m.sock.grpc"
    )
    tcp = addresses.parse("h:7171")
    assert tcp.control == tcp


def test_the_users_socket_is_in_the_runtime_directory_or_a_private_one():
    assert addresses.user_socket({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == Path(
        "/run/user/7/momentd/momentd.sock"
    )
    # The base directory specification: a relative path counts as unset.
    for environ in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "run"}):
        assert addresses.user_socket(environ, 7) == Path("/tmp/momentd-7/momentd.sock")


def test_the_data_directory_is_the_named_one_or_in_the_state_directory():
    home = Path("/home/x")
    assert addresses.default_data_dir({"MOMENTD_DATA_DIR": "/d"}, home) == Path("/d")
    assert addresses.default_data_dir({"XDG_STATE_HOME": "/s"}, home) == Path("/s/momentd")
    assert addresses.default_data_dir({}, home) == Path("/home/x/.local/state/momentd")
