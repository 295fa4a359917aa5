"""Latency windows, rates by a clock that the test turns, log lines, memory by kind."""

import io
import json
import logging
import mmap
import os

import numpy as np

from momentd_server.obs import logs, process
from momentd_server.obs.latency import WINDOW, LatencySummary, LatencyWindow, Rate


def test_a_window_forgets_what_is_old():
    window = LatencyWindow()
    assert window.summary() == LatencySummary()
    for value in range(WINDOW * 2):
        window.add(float(value))
    summary = window.summary()
    assert summary.max_s == 2 * WINDOW - 1
    assert abs(summary.p50_s - 1.5 * WINDOW) <= 1
    assert summary.p50_s < summary.p90_s < summary.p99_s < summary.max_s


def test_a_rate_is_the_mean_of_the_last_ten_seconds():
    now = [100.0]
    rate = Rate(lambda: now[0])
    rate.add(50)
    assert rate.per_second() == 0  # the second is not over
    now[0] = 101.5
    assert rate.per_second() == 5
    now[0] = 110.5
    assert rate.per_second() == 5
    now[0] = 111.5
    assert rate.per_second() == 0
    rate.add(7)
    now[0] = 10_000.0
    assert rate.per_second() == 0
    assert rate.total == 57


def test_log_lines_are_json_with_fields_and_are_bounded(monkeypatch):
    stream = io.StringIO()
    loggers = [logging.getLogger(name) for name in ("momentd", "grpc")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    monkeypatch.setattr(logging, "raiseExceptions", True)
    try:
        logs.configure(stream)
        logs.log.info("serving", pid=3, path=None)
        for index in range(50):
            logging.getLogger("momentd.x").warning(
                "again and again", extra={"fields": {"i": index}}
            )
        try:
            raise ValueError("bad")
        except ValueError as error:
            logs.log.error("failed", cause=error)
    finally:
        for logger, saved in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate, logger.level = saved
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines[0]["event"] == "serving"
    assert lines[0]["level"] == "info"
    assert lines[0]["pid"] == 3
    repeated = [line for line in lines if line["event"].startswith("again")]
    assert len(repeated) == logs.BURST + 1
    assert "left out" in repeated[-1]["event"]
    assert "ValueError: bad" in lines[-1]["traceback"]


def test_shared_memory_is_counted_apart_from_the_heap():
    size = 32 << 20
    fd = os.memfd_create("test")
    os.truncate(fd, size)
    before = process.memory_use()
    with mmap.mmap(fd, size) as memory:
        np.frombuffer(memory, np.uint8)[:] = 1
        grown = process.memory_use().shared_bytes - before.shared_bytes
    os.close(fd)
    assert abs(grown - size) < 4 << 20
    assert before.anonymous_bytes > 0
    assert before.file_bytes > 0


def test_a_process_is_named_by_pid_and_start():
    assert process.start_time(os.getpid()) == process.start_time(os.getpid()) > 0
    assert process.start_time(2**22 + 1) == 0
    assert process.boot_id() == process.boot_id() != ""
