"""The limits of the disk that the other benchmarks work on."""

from __future__ import annotations

from dataclasses import asdict

from .device import FILE_BYTES, QUEUE_DEPTH, SECONDS, limits
from .harness import Result, Row, Settings


def run(settings: Settings) -> Result:
    """Needs fio."""
    found = limits(settings.work_dir, file_bytes=FILE_BYTES // settings.scale)
    result = Result("device", [Row("disk under --work-dir", asdict(found))])
    result.notes.append(
        f"fio, direct I/O: 4 KiB at random with {QUEUE_DEPTH} in flight, 1 MiB in sequence with 8, "
        f"{SECONDS} s each over {FILE_BYTES / settings.scale / 2**30:.3g} GiB."
    )
    return result
