"""`momentd verify`: what it says, its exit codes, and that it changes nothing."""

import json
import os

import pytest
from click.testing import CliRunner

from momentd_server.cli.root import momentd
from momentd_server.storage.datadir import DataDir
from tests.support.damage import Flip, make_directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_directory(tmp_path_factory.mktemp("verify"))


def _bytes_of(path):
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def _verify(*options):
    return CliRunner().invoke(momentd, ["verify", *map(str, options)])


def test_a_good_directory_is_said_to_be_one_and_nothing_changes(directory):
    before = _bytes_of(directory)
    done = _verify("--data-dir", directory)
    assert done.exit_code == 0
    assert "2 tables, 2 snapshots, 2 segments" in done.output
    assert "everything as it was written" in done.output
    assert _bytes_of(directory) == before


def test_a_damaged_record_is_named_with_file_byte_table_and_row(directory):
    file = min(directory.rglob("*.seg"))
    flip = Flip(file, 4096 + 7, 2)
    flip.apply()
    try:
        done = _verify("--data-dir", directory, "--json")
        text = _verify("--data-dir", directory)
    finally:
        flip.apply()
    assert done.exit_code == text.exit_code == 1
    (damage,) = json.loads(done.stdout)["damages"]
    assert (damage["path"], damage["offset"], damage["row_count"]) == (str(file), 4096, 1)
    assert len(damage["tables"]) == len(damage["rows"]) == 1
    assert f"DAMAGED {file}, byte 4096" in text.output
    assert f"rows {damage['rows'][0]}" in text.output


def test_a_missing_and_a_cut_file_are_damages_of_their_tables(directory):
    first, second = sorted(directory.rglob("*.seg"))
    hidden = first.with_suffix(".away")
    whole = second.read_bytes()
    first.rename(hidden)
    os.truncate(second, 8192)
    try:
        done = _verify("--data-dir", directory, "--json")
    finally:
        hidden.rename(first)
        second.write_bytes(whole)
    damages = {damage["path"]: damage["what"] for damage in json.loads(done.stdout)["damages"]}
    assert "No such file" in damages[str(first)]
    assert "cut short" in damages[str(second)]


def test_a_file_of_no_table_is_told_but_is_no_damage(directory):
    stray = directory / "families" / "99" / "99.seg"
    stray.parent.mkdir()
    stray.write_bytes(b"\0" * 4096)
    try:
        done = _verify("--data-dir", directory, "--json")
    finally:
        stray.unlink()
        stray.parent.rmdir()
    assert done.exit_code == 0
    assert json.loads(done.stdout)["unlisted"] == [str(stray)]


def test_a_directory_in_use_is_refused_naming_the_process(directory):
    held = DataDir.open(directory)
    try:
        done = _verify("--data-dir", directory)
    finally:
        held.close()
    assert done.exit_code == 1
    assert f"pid {os.getpid()}" in done.output


def test_a_directory_that_is_none_is_not_made(tmp_path):
    done = _verify("--data-dir", tmp_path / "none")
    assert done.exit_code == 1
    assert "no momentd data directory" in done.output
    assert not (tmp_path / "none").exists()
