"""The Makefile does what the documents say, without doing it here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"setup", "demo", "test", "check", "fix", "bench", "protos", "torture", "clean"}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def _environment() -> dict[str, str]:
    """Without what an outer `make` hands down, so that this one decides for itself."""
    return {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAG"))
    }


def _make(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments], cwd=directory, env=_environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    """What `make setup` looks at, with an interpreter and an installer that only take notes."""
    for name in ("Makefile", "pyproject.toml", "constraints-dev.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "scripts").mkdir()
    setup = tmp_path / "scripts" / "setup.sh"
    setup.write_text('#!/bin/sh\nprintf "%s|" "$@" >> notes; echo >> notes\n')
    setup.chmod(0o755)
    return tmp_path


def test_every_target_is_listed_by_make_alone():
    shown = _make(ROOT, "help").stdout
    assert {line.split()[1] for line in shown.splitlines()} >= TARGETS


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_every_make_command_in_a_document_is_a_target(document):
    text = (ROOT / document).read_text()
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE))
    assert named
    assert named <= TARGETS


@pytest.mark.parametrize(
    ("target", "module"),
    [("demo", "examples.taxonomy"), ("bench", "benchmarks"), ("test", "pytest")],
)
def test_a_target_passes_its_options_on(target, module):
    shown = _make(ROOT, "-n", "-o", ".venv/.installed", target, "ARGS=--some-option 3").stdout
    assert f"-m {module}" in shown
    assert "--some-option 3" in shown


def test_a_second_setup_does_nothing(checkout):
    for _ in range(2):
        done = _make(checkout, "setup")
        assert done.returncode == 0, done.stderr
    assert (checkout / "notes").read_text() == "python3|.venv||\n"


def test_another_choice_of_torch_installs_again_and_is_remembered(checkout):
    for arguments in (["TORCH=torch --index-url U"], [], ["TORCH=torch --index-url U"]):
        done = _make(checkout, "setup", *arguments)
        assert done.returncode == 0, done.stderr
    (checkout / "pyproject.toml").touch()
    os.utime(checkout / "pyproject.toml", (2**31, 2**31))
    assert _make(checkout, "setup").returncode == 0
    line = "python3|.venv|torch --index-url U|\n"
    assert (checkout / "notes").read_text() == 2 * line


def test_a_failed_setup_is_tried_again(checkout):
    setup = checkout / "scripts" / "setup.sh"
    good = setup.read_text()
    setup.write_text("#!/bin/sh\nexit 1\n")
    assert _make(checkout, "setup").returncode != 0
    setup.write_text(good)
    assert _make(checkout, "setup").returncode == 0
    assert (checkout / "notes").exists()


@pytest.mark.parametrize(
    ("python", "complaint"),
    [("no-such-python", "apt-get install"), ("old-python", "needs Python 3.11")],
)
def test_setup_says_what_is_missing(tmp_path, python, complaint):
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.2"\n[ "$1" = -V ]\n')
    old.chmod(0o755)
    name = str(old) if python == "old-python" else python
    done = subprocess.run(
        [ROOT / "scripts/setup.sh", name, str(tmp_path / "venv")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert complaint in done.stderr
    assert not (tmp_path / "venv").exists()
