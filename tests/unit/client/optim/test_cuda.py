"""CUDA weights: the same numbers, no optimizer memory on the device, no copy read too early."""

import copy

import pytest
import torch

import momentd
from tests.support.optim import embedding, moments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def train(module, optimizer, steps, busy=None):
    for seed in range(steps):
        ids = torch.randint(0, 300, (90,), generator=torch.Generator().manual_seed(seed))
        if busy is not None:
            busy @ busy
        optimizer.zero_grad()
        module(ids.to(module.weight.device)).pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cuda_weights_follow_cpu_weights(backend, dtype):
    on_cpu = embedding(300, 16, dtype)
    on_cuda = copy.deepcopy(on_cpu).cuda()
    for module in (on_cpu, on_cuda):
        train(module, momentd.SparseAdam(module.parameters(), lr=0.01), 20)
    torch.testing.assert_close(on_cuda.weight.cpu(), on_cpu.weight)


def test_a_busy_stream_is_waited_for(backend):
    busy = torch.randn(4096, 4096, device="cuda")
    module = embedding(300, 16).cuda()
    twin = copy.deepcopy(module)
    reference = torch.optim.SparseAdam(twin.parameters(), lr=0.01)
    train(module, momentd.SparseAdam(module.parameters(), lr=0.01), 100, busy)
    train(twin, reference, 100)
    torch.testing.assert_close(module.weight, twin.weight, rtol=1e-5, atol=1e-5)


def test_state_takes_no_device_memory(backend):
    module = embedding(300_000, 16).cuda()
    optimizer = momentd.SparseAdam(module.parameters())
    before = torch.cuda.memory_allocated()
    train(module, optimizer, 3)
    optimizer.zero_grad()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_a_cpu_state_dict_loads_into_cuda_parameters(backend):
    on_cpu = embedding(300, 16)
    source = momentd.SparseAdam(on_cpu.parameters(), lr=0.01)
    train(on_cpu, source, 3)
    saved = source.state_dict()
    on_cuda = copy.deepcopy(on_cpu).cuda()
    target = momentd.SparseAdam(on_cuda.parameters(), lr=0.01)
    target.load_state_dict(saved)
    assert torch.equal(moments(target)[0], saved["state"][0]["exp_avg"])
    assert saved["state"][0]["exp_avg"].device.type == "cpu"
    assert target.state[on_cuda.weight]["exp_avg"].is_cuda
    for module, optimizer in ((on_cpu, source), (on_cuda, target)):
        train(module, optimizer, 3)
    torch.testing.assert_close(on_cuda.weight.cpu(), on_cpu.weight)


def test_a_step_inside_graph_capture_is_refused(backend):
    module = embedding(300, 16).cuda()
    optimizer = momentd.SparseAdam(module.parameters())
    train(module, optimizer, 1)
    with pytest.raises(momentd.errors.UnsupportedFeature), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
