"""Copies of an optimizer have tables of their own."""

import copy
import gc
import os
import pickle

import pytest
import torch

import momentd
from tests.support.optim import embedding, moments, step_rows, wait_for_drops


def trained(**kwargs):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.1, **kwargs)
    step_rows(optimizer, module.weight, [1, 7], [1.0, -2.0])
    return module, optimizer


def param_of(optimizer):
    return optimizer.param_groups[0]["params"][0]


def test_deepcopy_forks_tables(fake):
    module, optimizer = trained(run="r")
    other = copy.deepcopy(optimizer)
    assert len(fake.tables) == 2
    step_rows(other, param_of(other), [1], [9.0])
    step_rows(optimizer, module.weight, [1], [3.0])
    assert optimizer.state[module.weight]["step"] == 2
    assert moments(optimizer)[0][1, 0].item() == pytest.approx(0.9 * 0.1 + 0.3)
    assert moments(other)[0][1, 0].item() == pytest.approx(0.9 * 0.1 + 0.9)


def test_deepcopy_with_its_model_keeps_them_together(fake):
    module, optimizer = trained()
    copied, other = copy.deepcopy((module, optimizer))
    assert param_of(other) is copied.weight
    assert other.state[copied.weight]["step"] == 1


def test_deepcopy_of_an_unused_optimizer_needs_no_daemon(fake):
    optimizer = momentd.SparseAdam(embedding().parameters())
    other = copy.deepcopy(optimizer)
    assert fake.log == []
    assert other.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("copied", [copy.copy, lambda o: pickle.loads(pickle.dumps(o))])
def test_pickles_carry_the_moments(fake, copied):
    _, optimizer = trained(state_dtype=torch.float64)
    other = copied(optimizer)
    assert len(fake.tables) == 1
    assert torch.equal(moments(other)[0], moments(optimizer)[0])
    step_rows(other, param_of(other), [1], [3.0])
    assert len(fake.tables) == 2
    assert moments(other)[0][1, 0].item() == pytest.approx(0.9 * 0.1 + 0.3)
    assert other.state[param_of(other)]["step"] == 2
    assert set(other.defaults) == set(optimizer.defaults)


def test_collected_optimizers_leave_nothing(fake):
    for _ in range(50):
        module, optimizer = trained()
        finalizer = optimizer._finalizer
        del optimizer
        assert not finalizer.alive
        step_rows(momentd.SparseAdam(module.parameters()), module.weight, [2], [1.0])
    gc.collect()
    wait_for_drops()
    assert fake.tables == {}


def test_a_replaced_optimizers_session_calls_are_not_entered_by_the_collector(fake):
    """The collector may run in the middle of a call of the same session: drops wait in a thread."""
    _, optimizer = trained()
    original, inside = fake.reach, []

    def collecting(what):
        if what == "drop_tables":
            import threading

            inside.append(threading.current_thread().name)
        original(what)

    fake.reach = collecting
    del optimizer
    wait_for_drops()
    assert inside == ["momentd-drop"]


def in_child(function):
    """Run in a forked child; returns its exit status and what it wrote."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(write, repr(function()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    return os.waitpid(pid, 0)[1], text


def test_a_forked_child_gets_clones(fake):
    module, optimizer = trained()
    (parents,) = fake.tables

    def child():
        step_rows(optimizer, module.weight, [1], [3.0])
        return list(fake.tables), moments(optimizer)[0][1, 0].item()

    status, text = in_child(child)
    assert status == 0
    tables, value = eval(text)
    assert tables == [parents, parents + 1]
    assert value == pytest.approx(0.9 * 0.1 + 0.3)


def test_a_forked_child_drops_nothing_of_its_parents(fake):
    holder = [trained()]

    def child():
        holder.clear()
        gc.collect()
        wait_for_drops()
        return list(fake.tables)

    status, text = in_child(child)
    assert (status, eval(text)) == (0, list(fake.tables))


def test_a_child_of_a_parent_that_went_on_is_told(fake):
    _, optimizer = trained()
    (table,) = fake.tables.values()

    def child():
        table.update_number += 1
        try:
            optimizer.step()
        except momentd.errors.StateRolledBack as error:
            return str(error)

    _, text = in_child(child)
    assert "went on" in text


def test_public_attributes_survive_deepcopy(fake):
    _, optimizer = trained()
    other = copy.deepcopy(optimizer)
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert public == {name for name in vars(other) if not name.startswith("_")}
