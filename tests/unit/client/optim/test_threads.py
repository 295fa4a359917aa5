"""One OpenMP thread while a step copies; the user's setting is back afterwards."""

import threading

import pytest
import torch

import momentd._threads as threads
from momentd._threads import SingleThreaded

pytestmark = pytest.mark.skipif(threads._set_threads is None, reason="no OpenMP in this torch")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_block_has_one_and_the_rest_what_the_user_said():
    with SingleThreaded():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_other_threads_keep_theirs():
    seen = []
    with SingleThreaded():
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert seen == [2]


def test_an_exception_gives_it_back():
    def block():
        with SingleThreaded():
            raise ValueError("from the block")

    with pytest.raises(ValueError, match="from the block"):
        block()
    assert torch.get_num_threads() == 2


def test_a_block_that_was_never_left_is_undone_by_the_next():
    SingleThreaded().__enter__()
    with SingleThreaded():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
