"""stop and runs: what changes something."""

import json
import os
import subprocess
import sys

import pytest

from momentd_server.cli.manage import _Life


def test_stop_returns_when_the_daemon_is_gone(run, daemon):
    result = run("stop", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["stopped"] is True
    assert [request.discard for request in daemon.stop_requests] == [False]
    assert run("status").exit_code == 1


def test_stop_can_be_told_to_discard_and_not_to_wait(run, daemon):
    daemon.on_stop = lambda: None
    result = run("stop", "--discard", "--no-wait")
    assert result.exit_code == 0
    assert "1.50 s" in result.output
    assert daemon.stop_requests[0].discard


def test_a_daemon_that_goes_on_running_is_reported(run, daemon, monkeypatch):
    monkeypatch.setattr("momentd_server.cli.manage._STOP_MARGIN_S", -1.3)
    daemon.on_stop = lambda: None
    result = run("stop")
    assert result.exit_code == 1
    assert "still runs" in result.stderr


def test_a_process_has_ended_although_nobody_asked_for_its_exit_code():
    code = "print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "momentd"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        life = _Life.of(process.pid)
        process.stdin.write(b"\n")
        assert life is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert life.ended()
    assert life.ended()


def test_a_running_process_has_not_ended():
    with subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()", "momentd"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        process.stdout.readline()
        life = _Life.of(process.pid)
        ended = life.ended() if life else None
        process.communicate(b"\n")
    assert ended is False


def test_a_process_that_is_no_momentd_is_not_waited_for():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert _Life.of(process.pid) is None
        process.kill()


def test_runs_are_listed_with_their_sums_and_users(run, daemon):
    daemon.add_table(1, "sweep")
    daemon.add_table(2, "sweep")
    daemon.add_table(3, "old", name="kept")
    daemon.add_session(41, "sweep", [1, 2])

    found = {one["run"]: one for one in json.loads(run("runs", "list", "--json").stdout)["runs"]}

    assert found["sweep"]["tables"] == 2
    assert found["sweep"]["disk_bytes"] == 10 << 20
    assert found["sweep"]["pids"] == [41]
    assert found["old"]["pids"] == []
    assert "old" in run("runs", "list").output


def test_a_session_uses_a_named_table_of_another_run(run, daemon):
    daemon.add_table(3, "old", name="shared")
    daemon.add_session(41, "new", [3])
    found = {one["run"]: one for one in json.loads(run("runs", "list", "--json").stdout)["runs"]}
    assert found["old"]["pids"] == [41]
    assert found["new"]["tables"] == 0


def test_a_run_is_dropped_after_a_yes(run, daemon):
    daemon.add_table(1, "sweep")
    daemon.add_table(2, "other")
    assert run("runs", "drop", "sweep", text="n\n").exit_code == 1
    assert len(daemon.tables) == 2
    result = run("runs", "drop", "sweep", text="y\n")
    assert result.exit_code == 0, result.output
    assert [row.table.run for row in daemon.tables] == ["other"]


def test_a_run_in_use_is_dropped_only_by_force(run, daemon):
    daemon.add_table(1, "sweep")
    daemon.add_session(41, "sweep", [1])
    refused = run("runs", "drop", "sweep", "--yes")
    assert refused.exit_code == 1
    assert "pid 41 uses table 1" in refused.stderr
    assert daemon.ended == 1
    assert run("runs", "drop", "sweep", "--yes", "--force").exit_code == 0
    assert daemon.tables == []


def test_dropping_an_unknown_run_says_where_to_look(run):
    result = run("runs", "drop", "nothing", "--yes", "--json")
    assert result.exit_code == 1
    error = json.loads(result.stderr)["error"]
    assert error["reason"] == "TABLE_NOT_FOUND"
    assert "momentd runs list" in error["message"]


def test_prune_drops_what_is_idle_and_old_enough(run, daemon):
    daemon.add_table(1, "busy", age_s=1e6)
    daemon.add_table(2, "young", age_s=60)
    daemon.add_table(3, "old", age_s=1e6)
    daemon.add_session(41, "busy", [1])
    arguments = ("runs", "prune", "--older-than", "7d")

    dry = run(*arguments, "--dry-run")
    assert "would drop old" in dry.output
    assert len(daemon.tables) == 3

    assert run(*arguments, "--yes").exit_code == 0
    assert [row.table.run for row in daemon.tables] == ["busy", "young"]


def test_prune_keeps_what_somebody_began_to_use_meanwhile(run, daemon, monkeypatch):
    daemon.add_table(1, "raced", age_s=1e6)

    def confirm(*_, **__):
        daemon.add_session(41, "raced", [1])

    monkeypatch.setattr("click.confirm", confirm)
    result = run("runs", "prune", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["runs"] == []
    assert "kept raced" in result.stderr
    assert len(daemon.tables) == 1


def test_prune_with_nothing_to_do_says_so(run):
    assert "nothing to drop" in run("runs", "prune").output


@pytest.mark.parametrize("command", [["runs", "drop", "sweep"], ["runs", "prune"]])
def test_nothing_is_dropped_when_nobody_answers(run, daemon, command):
    daemon.add_table(1, "sweep")
    assert run(*command).exit_code == 1
    assert len(daemon.tables) == 1
