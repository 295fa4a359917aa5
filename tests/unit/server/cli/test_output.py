"""How tables fit a terminal, and how messages become JSON."""

from momentd_server.cli.output import columns, plain
from momentd_wire.v1 import momentd_pb2 as pb

HEADERS = ("id", "name", "rows", "p50")
ROWS = [("1", "entities", "2 M", "1.2 ms"), ("12", "relations.weight", "50 k", "900 ms")]


def table(**options):
    return columns(HEADERS, ROWS, left=("name",), **options).plain.splitlines()


def test_text_leans_left_and_numbers_right():
    assert table() == [
        "id  name              rows     p50",
        " 1  entities           2 M  1.2 ms",
        "12  relations.weight  50 k  900 ms",
    ]


def test_a_table_that_fits_is_whole():
    assert table(width=34, spare=("p50",)) == table()


def test_spare_columns_go_first_when_it_does_not_fit():
    assert table(width=33, spare=("p50",))[0] == "id  name              rows"


def test_then_the_longest_text_is_shortened():
    lines = table(width=20, spare=("p50",))
    assert lines[2] == "12  relations…  50 k"
    assert max(map(len, lines)) == 20


def test_a_legible_rest_stays_however_narrow_it_is():
    assert table(width=1)[2].startswith("12  relatio…")


def test_numbers_are_never_shortened():
    assert table(width=1)[2].endswith("50 k  900 ms")


def test_a_message_becomes_numbers_names_and_hexadecimal():
    update = pb.TableUpdate(step=2**60, dtype=pb.D_TYPE_FLOAT64, count=3)
    document = plain(update)
    assert document["step"] == 2**60
    assert document["dtype"] == "D_TYPE_FLOAT64"
    assert document["count"] == 3


def test_what_is_absent_is_null_and_zero_is_zero():
    document = plain(pb.TableUpdate())
    assert document["step"] is None
    assert document["table"] is None
    assert document["count"] == 0
    assert plain(pb.HelloReply(store_id=b"\x01\xff"))["store_id"] == "01ff"


def test_repeated_fields_become_lists():
    document = plain(pb.StatsReply(tables=[pb.TableStats(frames=1), pb.TableStats()]))
    assert [table["frames"] for table in document["tables"]] == [1, 0]
    assert plain(pb.SessionStats(tables=[3, 4]))["tables"] == [3, 4]
