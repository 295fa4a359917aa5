"""The benchmarks' own machinery, with torch on both sides: it needs no daemon and no clock."""

import json
import time

import pytest
import torch

from benchmarks import bench_hot, machine, side, tracing, workload
from benchmarks.__main__ import main
from benchmarks.harness import Settings


def test_hot_benchmark_compares_all_sides_and_writes_json(tmp_path, monkeypatch):
    many = bench_hot.Case("many", distinct=20, entries=30, goal=1.5)
    few = bench_hot.Case("few", distinct=5, entries=5)
    tables = [
        bench_hot.Table("in turns", 500, 4, (many, few), baselines=("memmap",)),
        bench_hot.Table("one by one", 500, 4, (few,), in_turns=False, baselines=()),
    ]
    monkeypatch.setattr(bench_hot, "tables", lambda settings: tables)

    main(["hot", "--side", "torch", "--repeats", "2", "--results", str(tmp_path),
          "--work-dir", str(tmp_path)])  # fmt: skip

    found = json.loads((tmp_path / "hot.json").read_text())
    rows = {row["case"]: row for row in found["rows"]}
    first, last = rows["in turns, many"], rows["one by one, few"]
    assert first["numbers"]["ratio_least"] <= first["numbers"]["ratio_most"]
    assert first["reached"] == (first["numbers"]["ratio"] >= 1.5)
    assert {"torch_ms", "momentd_ms", "memmap_ms"} <= {*first["numbers"]}
    assert last["reached"] is None
    assert "memmap_ms" not in last["numbers"]
    assert [row["goal"] for row in found["rows"]].count("memmap / ours >= 10") == 2
    assert found["details"]["in turns, few"]["torch"]["steps"] == 2 * side.BLOCK
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["packages"]["torch"] == torch.__version__
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hot.json", "hot.png"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_gpu_is_not_measured_and_the_reason_is_shown(tmp_path, capsys):
    assert main(["gpu", "--results", str(tmp_path), "--work-dir", str(tmp_path)]) == 0

    assert "SKIPPED gpu: torch" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_benchmark_compares_both_sides(tmp_path):
    main(["gpu", "--scale", "100", "--side", "torch", "--results", str(tmp_path),
          "--work-dir", str(tmp_path)])  # fmt: skip

    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {"torch_ms", "momentd_ms"} <= {*rows[0]["numbers"]}


def test_side_that_fails_ends_the_benchmark(capfd):
    shape = workload.Shape(rows=50, dim=2, distinct=5, entries=5)
    with (
        side.Side("abacus", shape) as process,
        pytest.raises(RuntimeError, match="the process of 'abacus' ended with 1"),
    ):
        process.wait()

    assert "KeyError: 'abacus'" in capfd.readouterr().err


def test_unknown_benchmark_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["hott"])
    assert "no such benchmark: hott" in capsys.readouterr().err


def test_gradients_touch_as_many_distinct_rows_as_asked():
    shape = workload.Shape(rows=1000, dim=3, distinct=100, entries=250)
    gradients = workload.Gradients(shape)

    first, second = gradients.next(), gradients.next()

    for gradient in (first, second):
        assert not gradient.is_coalesced()
        assert gradient._indices().shape == (1, 250)
        assert gradient._indices().unique().numel() == 100
    assert first._indices().tolist() != second._indices().tolist()


def test_filling_touches_the_state_of_every_row():
    parameter = workload.make_parameter(workload.Shape(250, 2, 1, 1))
    optimizer = torch.optim.SparseAdam([parameter])

    workload.fill_state(parameter, optimizer, fill_rows=100)

    assert (optimizer.state[parameter]["exp_avg"] != 0).all()


def test_busy_time_counts_overlapping_intervals_once():
    intervals = [("a", 0.0, 2.0), ("b", 1.0, 3.0), ("a", 5.0, 9.0), ("c", 20.0, 30.0)]

    assert tracing.busy_seconds(intervals, 1.0, 6.0) == pytest.approx(3.0)
    assert tracing.by_name(intervals, 1.0, 6.0) == pytest.approx({"a": 2.0, "b": 2.0})


def test_traced_functions_keep_their_result_and_are_recorded():
    class Owner:
        @staticmethod
        def work():
            return 7

    trace = tracing.Trace()
    trace.wrap(Owner, "work", "work")
    before = time.monotonic()

    assert Owner.work() == 7
    ((name, began, ended),) = trace.intervals
    assert name == "work"
    assert before <= began <= ended


def test_tracing_a_function_that_is_gone_is_an_error():
    with pytest.raises(AttributeError):
        tracing.Trace().wrap(time, "no_such_function", "x")


def test_machine_is_described(tmp_path):
    found = machine.describe(tmp_path)

    assert found["memory_bytes"] > 0
    assert found["disk"]["file_system"]
    assert machine.process_memory("self")["anonymous"] > 1 << 20


def test_scale_divides_tables(tmp_path):
    assert Settings(work_dir=tmp_path, scale=10).rows(1_000_000) == 100_000
