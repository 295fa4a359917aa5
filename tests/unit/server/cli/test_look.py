"""status, tables, stats: what people and programs read."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from momentd_server.cli.root import momentd
from momentd_wire.v1 import momentd_pb2 as pb


def test_status_says_what_a_person_wants_to_know(run, daemon):
    daemon.add_table(1, "sweep")
    daemon.add_table(2, "sweep", name="entities")
    daemon.add_session(41, "sweep", [1])

    result = run("status")

    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0] == f"momentd 9.9 serving at {daemon.address}"
    assert "pid 4194305, up 1h 02m" in result.output
    assert "128 MiB of 512 MiB (25 %), 250 of 1,000 frames dirty" in result.output
    assert "2 tables in 1 run, 1 session" in result.output


@pytest.mark.parametrize("state", ["starting", "draining", "failed"])
def test_status_fails_unless_the_daemon_serves(run, daemon, state):
    daemon.totals.state = state
    assert run("status").exit_code == 1
    assert run("status", "--json").exit_code == 1


def test_status_names_broken_tables(run, daemon):
    daemon.add_table(7, "sweep")
    assert "drop them" not in run("status").output
    daemon.tables[0].broken = True
    assert "tables 7: drop them" in run("status").output


def test_status_says_what_is_written_and_how_long_a_drive_lasts(run, daemon):
    daemon.totals.bytes_written = 1_000_000_000
    daemon.totals.disk_bytes_written = 1_500_000_000
    daemon.totals.disk_bytes_written_per_s = 1e6
    daemon.totals.needed_bytes = 3 << 30
    daemon.totals.rows_updated = 3_000_000

    output = " ".join(run("status").output.split())

    assert "GiB needed)" in output
    assert "1.50 times the records spilled" in output
    assert "500 bytes for each updated row" in output
    # 600 TB at 1 MB a second: 6e8 seconds.
    assert "a drive rated for 600 TB lasts 19.0 years" in output
    output = " ".join(run("status", "--drive-tbw", "60").output.split())
    assert "a drive rated for 60 TB lasts 1.9 years" in output
    assert run("status", "--drive-tbw", "0").exit_code == 2


def test_nothing_is_said_of_wear_before_anything_is_written(run, daemon):
    assert "years" not in run("status").output
    assert "times the records" not in run("status").output


def test_status_as_json_has_numbers_and_hexadecimal_ids(run, daemon):
    document = json.loads(run("status", "--json").stdout)
    assert document["address"] == daemon.address
    assert document["totals"]["cache_bytes"] == 512 << 20
    assert document["totals"]["store_id"] == "000102030405060708090a0b0c0d0e0f"


def test_json_has_every_field_of_the_protocol_even_zeros(run):
    totals = json.loads(run("status", "--json").stdout)["totals"]
    assert list(totals) == [field.name for field in pb.Totals.DESCRIPTOR.fields]


def test_tables_in_a_pipe_are_plain_columns(run, daemon):
    daemon.add_table(1, "sweep")
    daemon.add_table(12, "other", name="entities")

    lines = run("tables").output.splitlines()

    assert lines[0].split() == [
        "id", "name", "run", "rows", "width", "dtype", "record", "rule", "step",
    ]  # fmt: skip
    assert lines[1].split()[:4] == ["1", "[weight]", "sweep", "10,000,000"]
    assert lines[2].split()[:4] == ["12", "entities", "other", "10,000,000"]
    assert lines[1].index("sweep") == lines[2].index("other")


def test_nothing_is_cut_off_in_a_pipe(run, daemon):
    name = "a-table-with-a-long-name-" * 8
    daemon.add_table(1, "sweep", name=name)
    assert name in run("tables").output


def test_tables_of_one_run(run, daemon):
    daemon.add_table(1, "sweep")
    daemon.add_table(2, "other")
    document = json.loads(run("tables", "--json", "--run", "other").stdout)
    assert [table["table"]["id"] for table in document["tables"]] == [2]
    assert document["tables"][0]["schema"]["fields"][0]["dtype"] == "D_TYPE_FLOAT32"


def test_stats_show_tables_and_sessions(run, daemon):
    daemon.add_table(1, "sweep")
    daemon.add_session(41, "sweep", [1])
    output = run("stats").output
    assert "75 %" in output
    assert "0a1b2c3d" in output


def test_an_empty_daemon_says_so(run):
    output = run("stats").output
    assert "no tables" in output
    assert "no sessions" in output


def test_a_watch_prints_one_document_a_line(run, daemon):
    daemon.add_table(1, "sweep")
    result = run("stats", "--watch", "--json", "--interval", "100ms", "--count", "3")
    documents = [json.loads(line) for line in result.stdout.splitlines()]
    assert [len(document["tables"]) for document in documents] == [1, 1, 1]


def test_a_watch_in_a_pipe_is_plain_text(run):
    output = run("stats", "--watch", "--interval", "0.1", "--count", "2").output
    assert output.count("momentd 9.9 serving") == 2
    assert "\x1b" not in output


def test_an_interval_out_of_bounds_is_wrong_usage(run):
    result = run("stats", "--watch", "--interval", "1ms")
    assert result.exit_code == 2
    assert "100ms" in result.output


def test_without_a_daemon_the_error_says_how_to_start_one(tmp_path):
    address = f"unix:{tmp_path}/none.sock"
    result = CliRunner().invoke(momentd, ["status", "--address", address])
    assert result.exit_code == 1
    assert address in result.stderr
    assert "momentd serve" in result.stderr
    assert result.stdout == ""


def test_an_error_as_json_goes_to_standard_error(tmp_path):
    arguments = ["tables", "--json", "--address", f"unix:{tmp_path}/none.sock"]
    result = CliRunner().invoke(momentd, arguments)
    assert result.exit_code == 1
    assert json.loads(result.stderr)["error"]["reason"] == "UNAVAILABLE"
    assert result.stdout == ""


def test_a_wrong_address_is_wrong_usage():
    result = CliRunner().invoke(momentd, ["status", "--address", "nonsense"])
    assert result.exit_code == 2
    assert "unix:PATH" in result.output


def test_a_daemon_that_does_not_answer_is_given_up_after_the_timeout(run, daemon):
    daemon.delay_s = 1.0
    result = run("status", "--timeout", "100ms")
    assert result.exit_code == 1
    assert "within 0.1 s" in result.stderr


def test_the_option_beats_the_environment(run, tmp_path):
    result = run("status", "--address", f"unix:{tmp_path}/other.sock")
    assert "other.sock" in result.stderr


def test_the_machines_socket_is_used_when_the_user_has_none(daemon, monkeypatch, tmp_path):
    monkeypatch.delenv("MOMENTD_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    machine = daemon.address.removeprefix("unix:")
    monkeypatch.setattr("momentd_wire.addresses.MACHINE_SOCKET", machine)
    Path(machine).touch()  # the local plane's socket, of which only the name is looked at
    assert CliRunner().invoke(momentd, ["status"]).exit_code == 0


def test_a_token_comes_from_a_file_or_the_environment(run, daemon, monkeypatch, tmp_path):
    monkeypatch.setenv("MOMENTD_TOKEN", "from-environment")
    run("status")
    assert daemon.metadata["momentd-token"] == "from-environment"

    path = tmp_path / "token"
    path.write_text("from-file\n")
    run("status", "--token-file", str(path))
    assert daemon.metadata["momentd-token"] == "from-file"


@pytest.mark.parametrize(("content", "complaint"), [(None, "No such file"), ("\n", "empty")])
def test_a_token_file_that_cannot_serve_is_named(run, tmp_path, content, complaint):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    result = run("status", "--token-file", str(path))
    assert result.exit_code == 1
    assert str(path) in result.stderr
    assert complaint in result.stderr
