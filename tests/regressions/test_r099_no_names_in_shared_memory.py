"""R98, R99: shared memory with names leaks, and /dev/shm is small. Arenas are memfds: no names."""

from pathlib import Path

from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import LocalClient, make_config, serving


def test_fifty_clients_leave_no_entry_and_no_descriptor(tmp_path):
    shm = Path("/dev/shm")
    before_names = {path.name for path in shm.iterdir()}
    with (
        serving(make_config(tmp_path), NumpyEngine()) as daemon,
        LocalClient(tmp_path / "m.sock", arena_bytes=2 << 20) as witness,
    ):
        before = len([*Path("/proc/self/fd").iterdir()])
        for _ in range(50):
            with LocalClient(tmp_path / "m.sock", arena_bytes=4 << 20) as client:
                client.memory.close()
        region = witness.region(64)
        witness.array(region, "u1", (64,))[:] = 7
        while len(daemon._local._connections) > 1:
            pass
        assert len([*Path("/proc/self/fd").iterdir()]) <= before
    assert {path.name for path in shm.iterdir()} == before_names
