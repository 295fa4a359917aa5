"""R105: a data directory of a newer version is refused, untouched, by the daemon as a whole."""

import hashlib

import numpy as np
import pytest

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
