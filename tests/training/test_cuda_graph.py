"""One long tensor of weights learns exactly as torch's optimizers do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from calmatch import nets, ops
from calmatch.training.cuda_graph import FlatState, bf16_parameters
from calmatch.training.step import build_optimizer, parameter_groups


def network(dtype=torch.float64) -> nets.Net:
    torch.manual_seed(0)
    body = nets.build("small(width=4)", 5, 8)
    net = nets.Net(body, {"used": nn.Linear(5, 3), "idle": nn.Linear(2, 2)}).to(dtype)
    net.body.to(memory_format=torch.channels_last)
    return net


def loss(net: nn.Module, step: int, dtype=torch.float64) -> torch.Tensor:
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
    return net.heads["used"](net(images).logits).square().mean()


@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_flat_step_is_the_optimizers_step(name, momentum, clip):
    torches, ours = network(), network()
    runs = []
    for net in (torches, ours):
        ema = copy.deepcopy(net).requires_grad_(False)
        groups = parameter_groups(net, 0.01, 0.1, 0.5, {})
        runs.append((net, ema, build_optimizer(name, groups, 0.9, torch.device("cpu"))))
    net, ema, optimizer = runs[0]
    loss(net, 0).backward()  # the first step is torch's in both, so that state is taken over
    loss(ours, 0).backward()
    for _, _, each in runs:
        each.step()
        each.zero_grad(set_to_none=True)
    for state in runs[1][2].state.values():  # as a checkpoint gives them back: plain in memory
        state |= {k: v.contiguous() for k, v in state.items() if torch.is_tensor(v)}
    flat = FlatState(
        ours,
        runs[1][1] if momentum else None,
        runs[1][2],
        bf16=False,
        momentum=momentum,
        clip=clip,
        compiled=False,
    )
    for step in range(1, 6):
        loss(net, step).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if momentum:
            pairs = zip(ema.state_dict().values(), net.state_dict().values(), strict=True)
            ops.update_average(list(pairs), momentum)
        loss(flat.net, step).backward()
        if step == 1:
            flat.leave_out_idle()
        flat.advance()
    for pair in ((net, ours), (ema, runs[1][1])):
        for key, value in pair[0].state_dict().items():
            torch.testing.assert_close(pair[1].state_dict()[key], value, atol=1e-9, rtol=1e-7)
    for one, two in zip(net.parameters(), ours.parameters(), strict=True):
        for key, value in optimizer.state[one].items():
            own = runs[1][2].state[two][key]
            torch.testing.assert_close(own, torch.as_tensor(value), atol=1e-9, rtol=1e-6)


def test_bfloat16_copies_compute_what_autocast_computes():
    net = network(torch.float32)
    net.bf16 = True
    groups = parameter_groups(net, 0.01, 0.1, 1.0, {})
    optimizer = build_optimizer("adamw", groups, 0.9, torch.device("cpu"))
    images = torch.randn(6, 3, 8, 8)
    wanted = net(images).logits
    wanted.square().mean().backward()
    grads = {k: p.grad.clone() for k, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    flat = FlatState(net, None, optimizer, bf16=True, momentum=0.0, clip=0.0, compiled=False)
    assert all(flat.net.get_parameter(k).dtype == torch.bfloat16 for k in bf16_parameters(net))
    out = flat.net(images).logits
    assert torch.equal(out, wanted)
    out.square().mean().backward()
    for name, grad in grads.items():
        assert torch.equal(flat.net.get_parameter(name).grad.float(), grad), name
    flat.leave_out_idle()
    flat.advance()
    for name in bf16_parameters(net):
        exact, copied = net.get_parameter(name), flat.net.get_parameter(name)
        assert torch.equal(copied, exact.to(torch.bfloat16))
    assert set(dict(net.named_buffers())) == set(dict(flat.net.named_buffers()))
    for name, buffer in net.named_buffers():
        assert flat.net.get_buffer(name) is buffer  # statistics are shared, not copied
