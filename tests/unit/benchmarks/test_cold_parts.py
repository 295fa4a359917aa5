"""Parts of the benchmarks of cold rows, of Zipf, of tails and of gRPC."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import bench_cold, bench_grpc, bench_tail, cgroup, device, workload, zipf
from benchmarks.harness import Settings, Skipped


def test_zipf_counts_what_a_perfect_static_cache_misses():
    shape = workload.Shape(rows=1000, dim=2, distinct=200, entries=200)
    gradients = zipf.ZipfGradients(shape, kept=100)

    gradient = gradients.next()

    drawn = set(gradient._indices()[0].tolist())
    popular = set(gradients.rows_by_rank[:100].tolist())
    assert gradients.distinct == [len(drawn)]
    assert gradients.beyond == [len(drawn - popular)]
    assert 0 < len(drawn - popular) < len(drawn)
    assert gradient._values().shape == (200, 2)


def test_zipf_draws_by_rank():
    shape = workload.Shape(rows=50, dim=1, distinct=50_000, entries=50_000)
    gradients = zipf.ZipfGradients(shape, kept=0)

    counts = np.bincount(gradients.next()._indices()[0].numpy(), minlength=50)

    shares = np.arange(1, 51) ** -zipf.EXPONENT
    expected = 50_000 * shares / shares.sum()
    found = counts[gradients.rows_by_rank]
    assert np.all(np.abs(found - expected) < 6 * np.sqrt(expected) + 6)


def test_batches_given_again_have_the_same_rows_in_memory_of_their_own():
    shape = workload.Shape(rows=100, dim=3, distinct=10, entries=10)
    first = zipf.ZipfGradients(shape, kept=0).next()

    again = zipf.Again([first]).next()

    assert torch.equal(again._indices(), first._indices())
    assert torch.equal(again._values(), first._values())
    assert again._values().data_ptr() != first._values().data_ptr()


@pytest.mark.parametrize(
    ("text", "group", "version_1"),
    [
        ("4:memory:/a/b\n1:cpu:/\n0::/c\n", "/sys/fs/cgroup/memory/a/b", True),
        ("2:cpu,memory:/a\n0::/\n", "/sys/fs/cgroup/memory/a", True),
        ("1:name=systemd:/x\n0::/user/y\n", "/sys/fs/cgroup/user/y", False),
    ],
)
def test_limits_are_made_below_the_own_group(text, group, version_1):
    assert cgroup._own_group(text) == (Path(group), version_1)


def test_a_limit_that_cannot_be_set_names_what_was_asked(tmp_path):
    limit = cgroup.MemoryLimit(12345)
    limit.group = tmp_path / "missing" / "group"

    with pytest.raises(Skipped, match=r"12345 bytes in .*missing.*run as root"):
        limit.__enter__()


def test_reads_of_the_device_are_counted(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = device.reads_completed(tmp_path)
        opened.read()

    assert device.reads_completed(tmp_path) > before


def test_watched_steps_have_a_histogram_of_all_steps():
    shape = workload.Shape(200, 2, 10, 10)
    parameter = workload.make_parameter(shape)
    optimizer = torch.optim.SparseAdam([parameter])

    found = bench_tail.watched_steps(parameter, optimizer, workload.Gradients(shape).next, 30)
    details = bench_tail._details(found)

    assert sum(details["histogram, in medians"].values()) == 30
    assert details["slowest"][0]["ms"] == max(found.seconds) * 1e3


def test_echo_gives_every_message_back():
    with bench_grpc.echo() as channel:
        sent = [b"a" * 1000, b"", b"b" * (1 << 20)]
        assert list(channel.stream_stream(bench_grpc.METHOD)(iter(sent))) == sent


def test_writes_without_compaction_are_not_judged():
    first, after = (
        bench_cold.Look(reads=0, misses=0, evicted_bytes=e, device_bytes=d, compacted=0)
        for e, d in ((100, 100), (300, 320))
    )
    row = bench_cold._written(bench_cold.CASES[1], first, after)

    assert row.numbers["written/evicted"] == pytest.approx(1.1)
    assert row.reached is None

    after.compacted = 50
    assert bench_cold._written(bench_cold.CASES[1], first, after).reached is True


@pytest.mark.parametrize("name", ["cold", "lookahead", "zipf", "clients", "tail", "grpc"])
def test_benchmarks_of_the_daemon_refuse_torch_alone(name, tmp_path):
    import importlib

    benchmark = importlib.import_module(f"benchmarks.bench_{name}")
    settings = Settings(work_dir=tmp_path, results=tmp_path, scale=1000, side="torch")

    with pytest.raises(Skipped, match="--side torch"):
        benchmark.run(settings)
