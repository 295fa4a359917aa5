"""R68: a full disk is an error on one call, never SIGBUS; what was acknowledged stays."""

import numpy as np
import pytest

import momentd
from momentd.errors import OutOfSpace
from tests.support.real_daemon import RealDaemon


@pytest.mark.root
def test_the_daemon_outlives_a_full_disk_and_goes_on_when_there_is_space(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(6 << 20))
    with RealDaemon(small_disk, cache="16MiB") as daemon, momentd.connect(daemon.address) as client:
        table = client.open_table("t", rows=80_000, dim=128, rule=momentd.rules.SparseAdam())
        rng = np.random.default_rng(0)
        acknowledged = set()

        def update(rows):
            table.update(rows, np.ones((rows.size, 128), np.float32), lr=0.1)
            acknowledged.update(rows.tolist())

        def fill():
            for _ in range(60):
                update(rng.integers(0, 80_000, 2000))

        with pytest.raises(OutOfSpace, match="space"):
            fill()
        assert daemon.process.poll() is None
        rows = np.array(sorted(acknowledged))
        assert (table.gather(rows, fields=["exp_avg"]) > 0).all()
        update(rows[-1:])  # a row of the last acknowledged batches may be in RAM: both may happen
        ballast.unlink()
        update(rng.integers(0, 80_000, 2000))
