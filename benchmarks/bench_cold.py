"""Uniform rows of a table ten times as large as the cache: what a step that reads disk costs."""

from __future__ import annotations

from .harness import Result, Row, Settings, daemon, milliseconds, open_optimizer, settle, stats
from .machine import written_bytes
from .workload import FILL_ROWS, Gradients, Shape, fill_state, make_parameter, timed_steps

CACHE_BYTES = 410_000_000
STEPS = 60
WARM_UP_STEPS = 10
RECORD_FIELDS = 2


def run(settings: Settings) -> Result:
    """4 M x 128: 4.1 GB of state; needs momentd on our side."""
    # A batch is bounded by the cache, so a trial run has smaller ones as well.
    batch = settings.rows(10_000)
    shape = Shape(settings.rows(4_000_000), 128, batch, batch)
    parameter = make_parameter(shape)
    with (
        daemon(settings, CACHE_BYTES // settings.scale) as own,
        open_optimizer(parameter, own) as optimizer,
    ):
        if own is None:
            raise ValueError("this benchmark measures the daemon: it cannot run with side=torch")
        settings.console.print("filling ...")
        fill_state(parameter, optimizer, settings.rows(FILL_ROWS))
        settle(own)
        gradients = Gradients(shape)
        timed_steps(parameter, optimizer, gradients, WARM_UP_STEPS)
        before, counted = stats(own), written_bytes(own.pid)
        seconds = timed_steps(parameter, optimizer, gradients, STEPS)
        # What the last steps left dirty is written later, what the first ones found was as much.
        after, counted = stats(own), written_bytes(own.pid) - counted
    updated = shape.distinct * STEPS
    misses = after.tables[0].misses - before.tables[0].misses
    written = after.tables[0].bytes_written - before.tables[0].bytes_written
    record_bytes = RECORD_FIELDS * shape.dim * 4
    numbers = {
        **milliseconds(seconds),
        "rows/s": updated / sum(seconds),
        "cold rows/s": misses / sum(seconds),
        "cold share": misses / updated,
        "bytes/row": written / updated,
        "kernel's bytes/row": counted / updated,
    }
    result = Result("cold")
    result.rows.append(Row("4 M x 128, uniform, cache 410 MB", numbers))
    result.notes.append(
        f"bytes/row: written to segments for each updated row; a record has {record_bytes} bytes. "
        "kernel's: the same by /proc/PID/io, metadata of file system and catalog included."
    )
    return result
