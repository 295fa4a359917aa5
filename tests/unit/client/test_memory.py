"""Memory available to this process, from made-up trees of /proc and /sys/fs/cgroup."""

from momentd._memory import available_bytes

MIB = 1 << 20


def machine(tmp_path, available_kib, membership=""):
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    (proc / "self" / "cgroup").write_text(membership)
    return proc


def group(directory, limit, usage, cache, v1=False):
    directory.mkdir(parents=True, exist_ok=True)
    limit_file, usage_file, key = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if v1
        else ("memory.max", "memory.current", "inactive_file")
    )
    (directory / limit_file).write_text(f"{limit}\n")
    (directory / usage_file).write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"anon 1\n{key} {cache}\nfile 2\n")


def test_without_control_groups_it_is_the_machines(tmp_path):
    proc = machine(tmp_path, 4096)
    assert available_bytes(proc, tmp_path / "none") == 4 * MIB


def test_a_limit_counts_with_what_can_be_reclaimed(tmp_path):
    proc = machine(tmp_path, 1 << 30, "0::/app/run\n")
    group(tmp_path / "cg" / "app" / "run", 100 * MIB, 80 * MIB, 30 * MIB)
    assert available_bytes(proc, tmp_path / "cg") == 50 * MIB


def test_the_tightest_enclosing_group_counts(tmp_path):
    proc = machine(tmp_path, 1 << 30, "0::/app/run\n")
    group(tmp_path / "cg" / "app" / "run", "max", 80 * MIB, 0)
    group(tmp_path / "cg" / "app", 90 * MIB, 80 * MIB, 0)
    assert available_bytes(proc, tmp_path / "cg") == 10 * MIB


def test_version_1_is_understood(tmp_path):
    proc = machine(tmp_path, 1 << 30, "9:name=systemd:/\n4:memory:/box\n0::/\n")
    group(tmp_path / "cg" / "memory" / "box", 64 * MIB, 32 * MIB, 8 * MIB, v1=True)
    assert available_bytes(proc, tmp_path / "cg") == 40 * MIB


def test_a_path_of_the_host_that_is_not_visible_leaves_the_root(tmp_path):
    proc = machine(tmp_path, 1 << 30, "0::/docker/abc\n")
    group(tmp_path / "cg", 64 * MIB, 32 * MIB, 0)
    assert available_bytes(proc, tmp_path / "cg") == 32 * MIB


def test_it_is_never_negative(tmp_path):
    proc = machine(tmp_path, 1 << 30, "0::/\n")
    group(tmp_path / "cg", 64 * MIB, 80 * MIB, 0)
    assert available_bytes(proc, tmp_path / "cg") == 0


def test_this_machine_has_memory():
    assert available_bytes() > 0
