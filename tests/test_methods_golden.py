"""Every method against step-by-step traces of its reference implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from calmatch import losses, methods
from calmatch.core import Batch, Objective, Output, Task
from conftest import Golden

MARGIN = "cross_entropy + margin(m=4)"
FREE = "freematch(momentum=0.9, fairness=0.01)"
FREE_STATE = {"overall": "time_p", "mean": "p_model", "histogram": "label_hist"}
CASES = {  # file: spec, unlabelled loss, our memory -> the reference's name for it
    "supervised": ("supervised", "cross_entropy", {}),
    "fixmatch": ("fixmatch", "cross_entropy", {}),
    "fixmatch__soft": ("fixmatch(hard=False)", "cross_entropy", {}),
    "fixmatch_penalty": ("fixmatch", MARGIN, {}),
    "flexmatch": ("flexmatch", "cross_entropy", {"learnt": "class_beta"}),
    "flexmatch__nowarmup": ("flexmatch(warmup=False)", "cross_entropy", {"learnt": "class_beta"}),
    "freematch": (FREE, "cross_entropy", FREE_STATE),
    "freematch__m999": ("freematch", "cross_entropy", FREE_STATE),
    "freematch__quantile_clip": (
        FREE[:-1] + ", quantile=True, clip=True)",
        "cross_entropy",
        FREE_STATE,
    ),
    "freematch_penalty": (FREE, MARGIN, FREE_STATE),
}


class Linear(nn.Module):
    """The golden problem's network: weights are given, gradients at its logits are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor]] = []

    def at(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias, self.calls = weight, bias, []

    def forward(self, images: Tensor) -> Output:
        flat = images.flatten(1)
        logits = (flat @ self.weight + self.bias).requires_grad_()
        logits.retain_grad()
        self.calls.append((flat, logits))
        return Output(logits, flat)

    def gradient(self, rows: Tensor) -> Tensor:
        """Gradient at the logits of these pictures, summed over the calls that saw them."""
        total = torch.zeros(len(rows), self.bias.shape[0], dtype=rows.dtype)
        for seen, logits in self.calls:
            if logits.grad is not None:
                same = (rows.flatten(1)[:, None] == seen[None]).all(-1).to(rows.dtype)
                total += same @ logits.grad
        return total


def batch_at(file: Golden, step: int, method: type[methods.Method]) -> Batch:
    sizes = file.meta["sizes"]
    u = [file[key][step] for key in ("x_w", "x_s") if key in file]
    ids = file["idx_ulb"][step] if "idx_ulb" in file else torch.arange(sizes["Bu"])
    return Batch(
        x=(file["x_lb"][step],),
        y=file["y_lb"][step],
        u=tuple(u[: len(method.u_views)]),
        x_id=torch.arange(sizes["B"]),
        u_id=ids,
        step=torch.tensor(step),
        draws={},
    )


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_memory_equal_the_reference_at_every_step(name):
    file = Golden(f"methods/{name}")
    spec, unlabelled, memory = CASES[name]
    sizes = file.meta["sizes"]
    task = Task(sizes["K"], sizes["N_l"], sizes["N_u"], sizes["Fd"], sizes["T"], (4,) * sizes["K"])
    method = methods.build(spec, task).double()
    net = Linear()
    objective = Objective(net, method, losses.build("cross_entropy"), losses.build(unlabelled))
    totals = file["out_total_conv" if "out_total_conv" in file else "out_total"]
    for step in range(sizes["T"]):
        net.at(file["W"][step], file["b"][step])
        values, state = objective(batch_at(file, step, type(method)))
        values["loss"].backward()
        method.commit(state)
        assert values["loss"].item() == pytest.approx(float(totals[step]), abs=1e-6)
        assert values["labelled"].item() == pytest.approx(float(file["out_sup"][step]), abs=1e-6)
        for view in ("lb", "w", "s"):
            if f"out_grad_logits_{view}" in file:
                close(net.gradient(file[f"x_{view}"][step]), file[f"out_grad_logits_{view}"][step])
        for ours, theirs in memory.items():
            close(method.get_buffer(ours), file[f"state_{theirs}"][step])
        if "out_mask" in file:
            assert values["accepted"].item() == pytest.approx(float(file["out_mask"][step].mean()))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_flexmatch_remembers_the_same_label_for_every_picture():
    file = Golden("methods/flexmatch")
    sizes = file.meta["sizes"]
    task = Task(sizes["K"], sizes["N_l"], sizes["N_u"], sizes["Fd"], sizes["T"], (4,) * sizes["K"])
    method = methods.build("flexmatch", task).double()
    net = Linear()
    for step in range(sizes["T"]):
        net.at(file["W"][step], file["b"][step])
        method.commit(method(net, net, batch_at(file, step, type(method))).state)
        table = method.get_buffer("table")
        ours = torch.where(table == sizes["K"], -1, table)
        assert torch.equal(ours, file["state_label_table"][step])


def test_hard_pseudo_labels_split_the_unlabelled_loss_into_pseudo_ce_and_min_entropy():
    """The paper's equation: cross-entropy on U' and min-entropy on U'' make up the loss."""
    file = Golden("methods/fixmatch")
    sizes = file.meta["sizes"]
    task = Task(sizes["K"], sizes["N_l"], sizes["N_u"], sizes["Fd"], sizes["T"], (4,) * sizes["K"])
    plain = losses.build("cross_entropy")
    net = Linear()
    objective = Objective(net, methods.build("fixmatch", task), plain, plain)
    seen = torch.zeros(2)
    for step in range(sizes["T"]):
        net.at(file["W"][step], file["b"][step])
        values, _ = objective(batch_at(file, step, methods.FixMatch))
        parts = values["pseudo_ce"] + values["min_entropy"]
        assert parts.item() == pytest.approx(values["unlabelled"].item(), abs=1e-12)
        seen += torch.tensor([values["pseudo_ce"] > 0, values["min_entropy"] > 0])
    assert (seen > 0).all()
