"""What the disk itself can do, by fio, and what it did, by the kernel's count."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from .harness import Skipped

FILE_BYTES = 2 << 30
SECONDS = 4
QUEUE_DEPTH = 64


@dataclass(frozen=True)
class Limits:
    """4 KiB operations a second with 64 in flight, and MB/s in sequence, past the page cache."""

    random_read_iops: float
    random_write_iops: float
    read_mb_s: float
    write_mb_s: float


def limits(folder: Path, *, file_bytes: int = FILE_BYTES, seconds: int = SECONDS) -> Limits:
    """All four, of a file in `folder`. Raises Skipped without fio."""
    with _Fio(folder, file_bytes, seconds) as fio:
        write = fio.lay_out()
        return Limits(
            random_read_iops=fio.random("read"),
            random_write_iops=fio.random("write"),
            read_mb_s=fio.sequential("read"),
            write_mb_s=write,
        )


def random_read_iops(
    folder: Path, *, file_bytes: int = FILE_BYTES, seconds: int = SECONDS
) -> float:
    """4 KiB random reads a second of a written file in `folder`. Raises Skipped without fio."""
    with _Fio(folder, file_bytes, seconds) as fio:
        fio.lay_out()
        return fio.random("read")


def reads_completed(path: Path) -> int:
    """Reads that the device under `path` has completed since boot, whoever asked for them."""
    device = path.stat().st_dev
    file = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    return int(file.read_text().split()[0])


class _Fio:
    """Jobs over one file of a temporary folder; a context manager."""

    def __init__(self, folder: Path, file_bytes: int, seconds: int) -> None:
        if shutil.which("fio") is None:
            raise Skipped(
                "fio, which measures the disk's limits, is not in PATH: "
                "apt-get install fio, or dnf install fio"
            )
        self._folder = TemporaryDirectory(prefix="fio-", dir=folder)
        self._timed = ["--time_based", f"--runtime={seconds}"]
        self._common = [
            "fio", "--name=limit", f"--directory={self._folder.name}", f"--size={file_bytes}",
            "--direct=1", "--ioengine=libaio", "--output-format=json",
        ]  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def lay_out(self) -> float:
        """Write the file, since holes would be read from nowhere; MB/s."""
        job = ["--rw=write", "--bs=1m", "--iodepth=8", "--end_fsync=1"]
        return self._run("write", job)["bw_bytes"] / 1e6

    def random(self, kind: str) -> float:
        job = [f"--rw=rand{kind}", "--bs=4k", f"--iodepth={QUEUE_DEPTH}", "--norandommap"]
        return self._run(kind, [*job, *self._timed])["iops"]

    def sequential(self, kind: str) -> float:
        job = [f"--rw={kind}", "--bs=1m", "--iodepth=8"]
        return self._run(kind, [*job, *self._timed])["bw_bytes"] / 1e6

    def _run(self, kind: str, job: list[str]) -> dict[str, Any]:
        command = [*self._common, *job]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"fio ended with {done.returncode}: {done.stderr.strip()}; the command was: "
                + " ".join(command)
            )
        # Warnings may stand before the document.
        return json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][kind]
