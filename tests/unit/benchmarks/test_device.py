"""The disk's limits: a benchmark that cannot have them says so and is not run."""

import shutil

import pytest

from benchmarks import device
from benchmarks.__main__ import main


def test_without_fio_the_disk_is_not_measured_and_the_reason_is_shown(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))

    assert main(["device", "--results", str(tmp_path), "--work-dir", str(tmp_path)]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "SKIPPED device" in shown
    assert "apt-get install fio, or dnf install fio" in shown
    assert not (tmp_path / "device.json").exists()


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")
def test_limits_of_a_small_file_are_rates(tmp_path):
    found = device.limits(tmp_path, file_bytes=1 << 20, seconds=1)

    assert min(vars(found).values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_fio_that_fails_is_an_error_with_its_command(tmp_path, monkeypatch):
    fio = tmp_path / "fio"
    fio.write_text("#!/bin/sh\necho no such engine >&2\nexit 3\n")
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    with pytest.raises(RuntimeError, match="ended with 3: no such engine; the command was: fio"):
        device.random_read_iops(tmp_path)
