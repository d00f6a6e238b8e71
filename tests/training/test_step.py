import json

import pytest
import torch
from torch import nn

from calmatch.nets import Net
from calmatch.nets.classic import Tiny
from calmatch.training.step import (
    build_optimizer,
    layer_rates,
    parameter_groups,
    rate_factor,
)
from conftest import GOLDEN, Golden

NETS = json.loads((GOLDEN / "nets.json").read_text())
DECAYS = [
    (net, decay)
    for net, reference in NETS.items()
    for decay in reference.get("lr_and_wd_by_layer_decay", {})
]


def test_the_schedule_is_the_fields_at_every_step():
    file = Golden("schedule")
    keys = [key for key in file.arrays if key.startswith("lr_factor_warmup")]
    assert keys
    for key in keys:
        warmup = int(key.removeprefix("lr_factor_warmup"))
        ours = [rate_factor(int(t), 204_800, warmup) for t in file["lr_steps"]]
        torch.testing.assert_close(torch.tensor(ours).double(), file[key], atol=1e-7, rtol=0)


@pytest.mark.parametrize(("net", "decay"), DECAYS)
def test_every_parameters_rate_and_decay_are_the_references(net, decay):
    reference = NETS[net]
    dims = {name: len(shape) for name, shape in reference["params"].items()}
    ours = layer_rates(dims, 5e-4, float(decay))
    for name, (rate, weight_decay) in reference["lr_and_wd_by_layer_decay"][decay].items():
        assert ours[name][1] == pytest.approx(weight_decay), name
        assert ours[name][0] == pytest.approx(rate), name


def test_a_head_may_ask_for_its_own_rate():
    net = Net(Tiny(3), {"bayes": nn.Linear(4, 3), "project": nn.Linear(4, 3)})
    special = {"bayes": {"lr": 0.01, "weight_decay": 0.0}}
    groups = parameter_groups(net, 1e-3, 5e-4, 1.0, special)
    rates = {id(p): (g["peak"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert len(rates) == len(list(net.parameters()))
    assert rates[id(net.heads["bayes"].weight)] == (0.01, 0.0)
    assert rates[id(net.heads["project"].weight)] == (1e-3, 5e-4)
    assert rates[id(net.heads["project"].bias)] == (1e-3, 0.0)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_learning_rate_is_a_tensor_that_the_step_reads(name):
    net = Net(Tiny(3), {})
    groups = parameter_groups(net, 0.1, 0.0, 1.0, {})
    optimizer = build_optimizer(name, groups, 0.9, torch.device("cpu"))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.param_groups[0]["lr"].fill_(0.0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    optimizer.param_groups[0]["lr"].fill_(optimizer.param_groups[0]["peak"])
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
