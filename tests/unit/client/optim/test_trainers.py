"""What trainers around an optimizer do with it."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import momentd
from momentd.errors import UnsupportedFeature
from tests.support.optim import embedding, moments, sparse_grad, step_rows, twin


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
        lambda o: lr_scheduler.LambdaLR(o, lambda t: (t + 1) / 10),
    ],
    ids=["one-cycle", "cosine", "lambda"],
)
def test_schedulers_give_torchs_trajectory(fake, make):
    module, ours, other, theirs = twin(embedding(), lr=0.05)
    schedulers = [make(ours), make(theirs)]
    for number in range(10):
        for param, optimizer, scheduler in (
            (module.weight, ours, schedulers[0]),
            (other.weight, theirs, schedulers[1]),
        ):
            step_rows(optimizer, param, [1, 4, 1], [1.0, -number, 0.5])
            scheduler.step()
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)


def test_accelerate_moves_state_at_prepare(fake):
    """AcceleratedOptimizer saves, moves all tensors to the device, and loads."""
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters())

    def prepare():
        saved = optimizer.state_dict()
        moved = {
            key: {k: v.to("cpu") if torch.is_tensor(v) else v for k, v in entry.items()}
            for key, entry in saved["state"].items()
        }
        optimizer.load_state_dict({**saved, "state": moved})

    prepare()
    assert fake.log == []
    step_rows(optimizer, module.weight, [1], [1.0])
    prepare()
    assert fake.scattered_rows == 0
    assert len(fake.tables) == 1


def test_pykeen_rebuilds_the_class_from_a_saved_group(fake):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.5, betas=(0.8, 0.9))
    step_rows(optimizer, module.weight, [1], [1.0])
    optimizer.load_state_dict(optimizer.state_dict())
    for source in (optimizer, copy.deepcopy(optimizer)):
        group = source.state_dict()["param_groups"][0]
        kwargs = {key: value for key, value in group.items() if key != "params"}
        rebuilt = momentd.SparseAdam(params=module.parameters(), **kwargs)
        assert rebuilt.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("checkpoint", ["snapshot", "full"])
def test_dcp_gets_and_sets_state_of_trained_and_fresh_optimizers(fake, checkpoint, flat, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = nn.Sequential(embedding(seed=1))
    optimizer = momentd.SparseAdam(model.parameters(), lr=0.1, checkpoint=checkpoint)
    step_rows(optimizer, model[0].weight, [1, 7], [1.0, 2.0])
    dcp.save(
        {"optim": get_optimizer_state_dict(model, optimizer, options=options)},
        checkpoint_id=tmp_path / "ckpt",
        no_dist=True,
    )

    other_model = copy.deepcopy(model)
    other_model[0].weight.grad = None
    other = momentd.SparseAdam(other_model.parameters(), lr=0.7, checkpoint=checkpoint)
    loaded = {"optim": get_optimizer_state_dict(other_model, other, options=options)}
    dcp.load(loaded, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    set_optimizer_state_dict(other_model, other, loaded["optim"], options=options)
    assert other.param_groups[0]["lr"] == 0.1
    for ours, theirs in zip(moments(other), moments(optimizer), strict=True):
        assert torch.equal(ours, theirs)
    assert other.state[other_model[0].weight]["step"] == 1
    # Into an optimizer that has state of its own too.
    step_rows(other, other_model[0].weight, [3], [1.0])
    loaded = {"optim": get_optimizer_state_dict(other_model, other, options=options)}
    dcp.load(loaded, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    set_optimizer_state_dict(other_model, other, loaded["optim"], options=options)
    for ours, theirs in zip(moments(other), moments(optimizer), strict=True):
        assert torch.equal(ours, theirs)


def test_dcps_request_for_state_moves_nothing(fake):
    module = embedding()
    before = module.weight.detach().clone()
    optimizer = momentd.SparseAdam(module.parameters())
    module.weight.grad = torch.zeros_like(module.weight)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0)
    optimizer.step(closure=None)
    assert optimizer.state[module.weight]["step"] == 0
    assert torch.equal(module.weight, before)
    assert fake.log == []
    # With anything in it, it is a dense gradient like any other.
    optimizer = momentd.SparseAdam(module.parameters())
    optimizer.param_groups[0]["lr"] = 0.0
    module.weight.grad[3, 1] = 1.0
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        optimizer.step()


def test_lightning_style_closures_and_toggles(fake):
    module, ours, other, theirs = twin(embedding(), lr=0.1)
    for optimizer, mod in ((ours, module), (theirs, other)):
        for _ in range(3):

            def closure(optimizer=optimizer, mod=mod):
                optimizer.zero_grad()
                loss = mod(torch.tensor([1, 2, 1])).pow(2).sum()
                loss.backward()
                return loss

            optimizer.step(closure=closure)
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradscaler_unscales_and_skips(fake, dtype):
    module, ours, other, theirs = twin(embedding(dtype=dtype), lr=0.1)
    for optimizer, param in ((ours, module.weight), (theirs, other.weight)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        sparse_grad(param, [3, 3, 5], [1024.0, 2048.0, 512.0])
        scaler.step(optimizer)
        scaler.update()
        sparse_grad(param, [3], [float("inf")])
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 512.0
    assert ours.state[module.weight]["step"] == theirs.state[other.weight]["step"] == 1
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)


def test_accumulated_gradients_follow_torch(fake):
    module, ours, other, theirs = twin(embedding(), lr=0.1)
    for mod, optimizer in ((module, ours), (other, theirs)):
        for ids in ([1, 2, 2], [2, 9]):
            mod(torch.tensor(ids)).pow(2).sum().backward()
        optimizer.step()
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)


def test_importing_the_optimizer_does_not_import_dynamo():
    code = "import sys, momentd; momentd.SparseAdam; print('torch._dynamo' in sys.modules)"
    plain = "import sys, torch; print('torch._dynamo' in sys.modules)"
    run = [
        subprocess.run(
            [sys.executable, "-c", c],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        )
        for c in (code, plain)
    ]
    assert run[0].stdout == run[1].stdout


def test_cuda_graph_capture_is_refused_before_anything_happens(fake, monkeypatch):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters())
    sparse_grad(module.weight, [1], [1.0])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedFeature, match="cannot be captured"):
        optimizer.step()
    assert fake.log == []
