"""R105: a data directory of a newer version is refused, untouched, by the daemon as a whole."""

import hashlib

import numpy as np
import pytest

from momentd_server.storage import migrations
from momentd_server.storage.hashing import hash_bytes
from momentd_wire.errors import Incompatible, InvalidArgument
from tests.support.local_engine import (
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)


def _content(path):
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "LOCK"
    }


@pytest.fixture
def stopped(tmp_path):
    engine = start_engine(tmp_path)
    table = open_table(engine, open_session(engine), adam_schema(100, 8), "t")
    engine.update([batch(table, [1], np.ones((1, 8), np.float32))])
    engine.stop()
    engine.close()
    return tmp_path


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda text: text.replace("momentd-data 1 ", "momentd-data 2 "), Incompatible),
        (lambda _text: "something else entirely\n", InvalidArgument),
    ],
)
def test_another_format_is_refused_and_nothing_is_modified(stopped, change, error):
    marker = stopped / "data" / "FORMAT"
    marker.write_text(change(marker.read_text()))
    before = _content(stopped / "data")
    with pytest.raises(error):
        start_engine(stopped)
    assert _content(stopped / "data") == before


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        (migrations.FORMAT_VERSION + 1, "newer: use the momentd version that wrote it"),
        (0, "no momentd ever wrote that"),
        (None, "no momentd ever wrote that"),
    ],
)
def test_the_refusal_names_both_versions_and_the_next_step(found, advice):
    text = f"data format {found}, this momentd reads {migrations.FORMAT_VERSION}: .*{advice}"
    with pytest.raises(Incompatible, match=text):
        migrations.check_version(found, "/data", "data")


def test_an_older_version_is_refused_with_what_can_be_done_about_it(monkeypatch):
    monkeypatch.setattr(migrations, "FORMAT_VERSION", 3)
    with pytest.raises(Incompatible, match="older, and cannot be migrated"):
        migrations.check_version(1, "/data", "data")
    monkeypatch.setattr(migrations, "MIGRATIONS", {1: print, 2: print})
    with pytest.raises(Incompatible, match="older, and can be migrated"):
        migrations.check_version(1, "/data", "data")


def test_every_older_version_has_a_migration():
    assert set(migrations.MIGRATIONS) == set(range(1, migrations.FORMAT_VERSION))


def test_a_segment_of_a_newer_version_breaks_its_table_and_keeps_what_counts(stopped):
    (file,) = (stopped / "data").rglob("*.seg")
    block = bytearray(file.read_bytes())
    block[8:12] = (2).to_bytes(4, "little")
    block[4088:4096] = hash_bytes(bytes(block[:4088])).to_bytes(8, "little")
    file.write_bytes(block)
    engine = start_engine(stopped)
    (table,) = engine.list_tables()
    with pytest.raises(Incompatible, match="segment format 2, this momentd reads 1"):
        engine.update([batch(table, [1], np.ones((1, 8), np.float32))])
    engine.stop(discard=True)
    engine.close()
    # Only room that was reserved behind what counts is given back.
    left = file.read_bytes()
    assert block == left + bytes(len(block) - len(left))
