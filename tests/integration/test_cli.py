"""The command line with a real daemon and a real client: what the README's commands do."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import momentd

MOMENTD = (sys.executable, "-m", "momentd_server")
ROWS = np.arange(100, dtype=np.int64)
GRADS = np.linspace(-1, 1, 100 * 8, dtype=np.float32).reshape(100, 8)


class Home:
    """One data directory and address, with commands and daemons in processes of their own."""

    def __init__(self, path: Path) -> None:
        self.data_dir = path / "data"
        self.address = f"unix:{path}/s"
        self._daemons: list[subprocess.Popen[str]] = []

    def serve(self, *options: str) -> subprocess.Popen[str]:
        command = [*MOMENTD, "serve", "--data-dir", str(self.data_dir), "--cache", "32MiB"]
        daemon = subprocess.Popen(
            [*command, "--address", self.address, *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._daemons.append(daemon)
        return daemon

    def ready(self, *options: str) -> tuple[subprocess.Popen[str], str]:
        """A daemon that serves, and the line that it said so with."""
        daemon = self.serve(*options)
        assert daemon.stdout is not None
        line = daemon.stdout.readline()
        assert line, daemon.communicate()[1]
        return daemon, line

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*MOMENTD, *arguments, "--address", self.address],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def json(self, *arguments: str) -> dict:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def end(self) -> None:
        for daemon in self._daemons:
            if daemon.poll() is None:
                daemon.kill()
            daemon.communicate()


@pytest.fixture
def home(tmp_path_factory):
    made = Home(tmp_path_factory.mktemp("h"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """A daemon that several tests share."""
    made = Home(tmp_path_factory.mktemp("h"))
    made.ready()
    yield made
    made.end()


def test_it_says_when_it_serves_and_status_agrees(home):
    daemon, line = home.ready("--json")
    facts = json.loads(line)
    assert facts["pid"] == daemon.pid
    assert facts["cache_bytes"] == 32 << 20

    status = home.json("status")
    assert status["totals"]["state"] == "serving"
    assert status["totals"]["pid"] == daemon.pid
    assert status["totals"]["data_dir"] == str(home.data_dir)
    assert status["totals"]["rss_anonymous_bytes"] > 0


def test_a_stop_makes_everything_durable_and_returns_after_the_end(home):
    daemon, _ = home.ready()
    with momentd.connect(home.address, run="kept") as client:
        client.open_table("entities", rows=1000, dim=8).update(ROWS, GRADS, lr=0.1)

    done = home.run("stop")

    assert done.returncode == 0, done.stderr
    assert daemon.wait(5) == 0, "the process is gone when the command returns"
    assert f"stopped (pid {daemon.pid})" in done.stdout

    home.ready()
    with momentd.connect(home.address) as client:
        table = client.open_table("entities", rows=1000, dim=8, mode="open")
        assert table.step == 1
        first = table.gather(ROWS, fields=["exp_avg"])
    assert np.allclose(first, 0.1 * GRADS, rtol=1e-5)


def test_tables_and_stats_show_what_a_client_did(serving):
    with momentd.connect(serving.address, run="looked-at") as client:
        table = client.open_table("shown", rows=1000, dim=8)
        table.update(ROWS, GRADS, lr=0.1)

        [info] = serving.json("tables", "--run", "looked-at")["tables"]
        stats = serving.json("stats", "--run", "looked-at")
        text = serving.run("stats").stdout

    assert (info["name"], info["schema"]["rows"], info["step"]) == ("shown", 1000, 1)
    [row] = stats["tables"]
    assert (row["rows_touched"], row["updates"], row["rows_updated"]) == (100, 1, 100)
    assert row["update_latency"]["p50_s"] > 0
    assert os.getpid() in [session["pid"] for session in stats["sessions"]]
    assert "shown" in text
    assert str(os.getpid()) in text


def test_a_run_in_use_is_kept_unless_forced(serving):
    with momentd.connect(serving.address, run="in-use") as client:
        client.open_table(None, rows=10, dim=8).update(ROWS[:3], GRADS[:3], lr=0.1)
        refused = serving.run("runs", "drop", "in-use", "--yes")
        assert refused.returncode == 1
        assert "Traceback" not in refused.stderr
        assert [run["run"] for run in serving.json("runs", "list")["runs"]].count("in-use") == 1
        assert serving.run("runs", "drop", "in-use", "--yes", "--force").returncode == 0
        assert client.list_tables("in-use") == []
        programs = [session["program"] for session in serving.json("stats")["sessions"]]
    assert programs.count("momentd runs") == 0, "a command leaves no session behind"


def test_prune_drops_the_named_tables_that_nobody_uses(serving):
    with momentd.connect(serving.address, run="forgotten") as client:
        client.open_table("old", rows=10, dim=8)
    dropped = serving.json("runs", "prune", "--yes")["runs"]
    assert "forgotten" in [run["run"] for run in dropped]
    assert serving.json("tables", "--run", "forgotten")["tables"] == []


def test_a_second_daemon_on_the_same_data_directory_is_refused(home):
    daemon, _ = home.ready()
    other = subprocess.run(
        [
            *(*MOMENTD, "serve", "--data-dir", str(home.data_dir)),
            *("--cache", "32MiB", "--address", f"{home.address}2"),
        ],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert other.returncode == 1
    assert str(daemon.pid) in other.stderr
    assert "Traceback" not in other.stderr


def test_foreign_files_are_not_touched(home):
    home.data_dir.mkdir()
    (home.data_dir / "thesis.tex").write_text("mine")
    daemon = home.serve()
    output, errors = daemon.communicate(timeout=60)
    assert daemon.returncode == 1
    assert output == ""
    assert "thesis.tex" in errors
    assert [path.name for path in home.data_dir.iterdir()] == ["thesis.tex"]


def test_a_watch_ends_quietly_by_interrupt(serving):
    watch = subprocess.Popen(
        [
            *(*MOMENTD, "stats", "--watch", "--json"),
            *("--interval", "100ms", "--address", serving.address),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watch.stdout is not None
    first, second = (json.loads(watch.stdout.readline()) for _ in range(2))
    watch.send_signal(signal.SIGINT)
    _, errors = watch.communicate(timeout=20)
    assert (watch.returncode, errors) == (0, "")
    assert second["totals"]["uptime_s"] > first["totals"]["uptime_s"]


def test_a_reader_that_goes_away_is_no_traceback(serving):
    command = " ".join([*MOMENTD, "stats", "--watch", "--interval", "100ms", "--address"])
    done = subprocess.run(
        ["bash", "-c", f"{command} {serving.address} | head -n 2"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "serving" in done.stdout
    assert done.stderr == ""


def test_a_terminal_gets_a_table_that_fits_and_no_json(serving):
    controller, terminal = pty.openpty()
    command = [*MOMENTD, "status", "--address", serving.address]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdout=terminal, env=environment) as process:
        assert process.wait(60) == 0
    os.close(terminal)
    shown = b""
    while select.select([controller], [], [], 0)[0]:
        try:
            shown += os.read(controller, 1 << 16)
        except OSError:  # the other end is closed and everything was read
            break
    os.close(controller)
    assert b"\x1b[" in shown
    assert b"serving" in shown


def test_grpc_addresses_serve_the_command_line_as_well(serving):
    path = serving.address.removeprefix("unix:")
    done = subprocess.run(
        [*MOMENTD, "status", "--json", "--address", f"grpc+unix:{path}.grpc"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["totals"]["state"] == "serving"


def test_verify_asks_the_daemon_and_reads_the_directory_when_it_has_ended(home):
    home.ready()
    with momentd.connect(home.address) as client:
        table = client.open_table("t", rows=100, dim=8)
        table.update(ROWS, GRADS, lr=0.1)
        table.flush()
        refused = home.run("verify", "--data-dir", str(home.data_dir))
        online = home.json("verify", "--rate", "0B")
    assert refused.returncode == 1
    assert "uses" in refused.stderr
    assert online["damages"] == []
    assert (online["counts"]["tables"], online["counts"]["records"]) == (1, 100)
    assert home.run("stop").returncode == 0
    assert home.json("verify", "--data-dir", str(home.data_dir))["counts"]["records"] == 100
    (segment,) = home.data_dir.rglob("*.seg")
    data = bytearray(segment.read_bytes())
    data[4096 + 9] ^= 4
    segment.write_bytes(data)
    home.ready()
    found = home.run("verify", "--json")
    assert found.returncode == 1
    (damage,) = json.loads(found.stdout)["damages"]
    assert (damage["path"], damage["offset"], damage["row_count"]) == (str(segment), 4096, 1)
