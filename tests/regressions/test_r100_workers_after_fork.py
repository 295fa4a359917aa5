"""R100: worker processes hang or share a connection when they were forked after first use."""

import multiprocessing

import numpy as np
import pytest

import momentd
from tests.support.momentd_daemon import RestartableDaemon


@pytest.fixture
def daemon(tmp_path):
    daemon = RestartableDaemon(tmp_path)
    daemon.start()
    yield daemon
    daemon.stop()


def work(client, row, results):
    table = client.open_table("shared", rows=10, dim=4)
    table.update([row], np.ones((1, 4)), lr=0.1)
    results.put((row, table.gather([row], "exp_avg")[0, 0], client.session.hello.session))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("used", ["before", "never"])
def test_workers_of_every_start_method_train(daemon, method, used):
    context = multiprocessing.get_context(method)
    results = context.Queue()
    with momentd.connect(daemon.local) as client:
        if used == "before":
            client.open_table("shared", rows=10, dim=4).update([0], np.ones((1, 4)), lr=0.1)
        workers = [context.Process(target=work, args=(client, row, results)) for row in (1, 2, 3)]
        for worker in workers:
            worker.start()
        found = [results.get(timeout=50) for _ in workers]
        for worker in workers:
            worker.join(10)
            assert worker.exitcode == 0
        assert sorted(row for row, _, _ in found) == [1, 2, 3]
        assert all(value == pytest.approx(0.1) for _, value, _ in found)
        assert len({session for _, _, session in found}) == 3
        table = client.open_table("shared", rows=10, dim=4)
        assert table.refresh().update_number == (4 if used == "before" else 3)
    results.close()
    results.join_thread()
