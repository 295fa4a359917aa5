"""Generates the Python code of the contract from its .proto files.

The generator is pinned to the oldest protobuf that momentd supports: generated code refuses to be
imported by a runtime older than its generator, so the generator sets the floor for every user. It
lives in an environment of its own (.venv-protos), because it needs that old protobuf itself.

    python scripts/gen_protos.py            write the generated files
    python scripts/gen_protos.py --check    generate elsewhere, compare bytes, change nothing
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
ENVIRONMENT = ROOT / ".venv-protos"
PYTHON = ENVIRONMENT / "bin" / "python"
GENERATORS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
# grpcio-tools 1.71.2 imports pkg_resources, which setuptools 81 removed.
REQUIREMENTS = (
    "grpcio-tools==1.71.2",
    "mypy-protobuf==3.6.0",
    "protobuf==5.29.6",
    "setuptools<81",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--check", action="store_true", help="compare only, change nothing")
    check: bool = parser.parse_args().check
    ensure_environment()
    if not check:
        generate(PROTOS)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        fresh = Path(directory)
        generate(fresh)
        stale = differences(PROTOS, fresh)
    for line in stale:
        print(line)
    if stale:
        print("generated code is stale: run `make protos` and commit the result", file=sys.stderr)
    return 1 if stale else 0


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


def ensure_environment() -> None:
    """Makes .venv-protos unless it holds exactly the wanted packages (a stamp says which)."""
    stamp = ENVIRONMENT / ".installed"
    wanted = "\n".join(REQUIREMENTS)
    if PYTHON.exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    print("preparing the proto generator in .venv-protos", file=sys.stderr)
    if not PYTHON.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    install = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *REQUIREMENTS], check=True)
    stamp.write_text(wanted)


def generate(target: Path) -> None:
    """Writes the generated files of all .proto files below `target`, by their import paths."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    command = [
        str(PYTHON),
        *("-m", "grpc_tools.protoc", f"-I{PROTOS}"),
        f"--python_out={target}",
        f"--pyi_out={target}",
        f"--grpc_python_out={target}",
        f"--plugin=protoc-gen-mypy_grpc={ENVIRONMENT / 'bin' / 'protoc-gen-mypy_grpc'}",
        f"--mypy_grpc_out=quiet:{target}",
    ]
    subprocess.run([*command, *sources], check=True)


def differences(committed: Path, fresh: Path) -> list[str]:
    """One unified diff of all generated files, empty if they are the same bytes."""
    names = {
        path.relative_to(base)
        for base in (committed, fresh)
        for pattern in GENERATORS
        for path in base.rglob(pattern)
    }
    lines: list[str] = []
    for name in sorted(names):
        old, new = (_lines(base / name) for base in (committed, fresh))
        lines += difflib.unified_diff(old, new, f"committed/{name}", f"fresh/{name}", lineterm="")
    return lines


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
