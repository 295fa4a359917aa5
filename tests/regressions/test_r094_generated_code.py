"""R94: generated code must not ask for a newer runtime than the package's own floor."""

import re
from pathlib import Path

import momentd_wire

GENERATED = Path(momentd_wire.__file__).parent / "v1"


def _floor(package: str) -> tuple[int, ...]:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (floor,) = set(re.findall(rf'"{package}>=([0-9.]+)', text))
    return tuple(int(part) for part in floor.split("."))


def test_the_protobuf_generator_is_not_newer_than_the_declared_runtime():
    text = (GENERATED / "momentd_pb2.py").read_text()
    major, minor, patch = re.search(
        r"ValidateProtobufRuntimeVersion\(\s*[\w.]+,\s*(\d+),\s*(\d+),\s*(\d+),", text
    ).groups()
    assert (int(major), int(minor), int(patch)) <= (*_floor("protobuf"), 0)


def test_the_grpc_generator_is_not_newer_than_the_declared_runtime():
    text = (GENERATED / "momentd_pb2_grpc.py").read_text()
    version = re.search(r"GRPC_GENERATED_VERSION = '([0-9.]+)'", text)[1]
    assert tuple(int(part) for part in version.split(".")) <= _floor("grpcio")
