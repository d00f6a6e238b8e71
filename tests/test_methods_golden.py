"""Every method against step-by-step traces of its reference implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calmatch import losses, methods, ops
from calmatch.core import Batch, Method, Objective, Output, Task
from calmatch.methods.bam import Bayes
from conftest import Golden

MARGIN = "cross_entropy + margin(m=4)"
FREE = "freematch(momentum=0.9, fairness=0.01)"
FREE_STATE = {"overall": "time_p", "mean": "p_model", "histogram": "label_hist"}
ALIGNED = {"mean": "p_model", "target": "p_target"}
SOFT_STATE = ALIGNED | {"centre": "mu", "spread": "var"}
SIM = "simmatch(threshold=0.8, queue=8, gate=10, size=8"
SIM_STATE = {"bank": "mem_bank", "labels": "labels_bank", "queue": "da_queue"}
SIM_STATE |= {"queue_place": "da_ptr"}
CO_STATE = {"features": "queue_feats", "probs": "queue_probs", "place": "queue_ptr"}
CO_STATE |= {"queue": "da_queue", "queue_place": "da_ptr"}
CASES: dict[str, tuple[str, str, dict[str, str]]] = {
    # file: spec, penalty, our memory -> the reference's name for it
    "supervised": ("supervised", "", {}),
    "pseudolabel": ("pseudolabel", "", {}),
    "pimodel": ("pimodel", "", {}),
    "meanteacher": ("meanteacher", "", {}),
    "vat": ("vat", "", {}),
    "mixmatch": ("mixmatch", "", {}),
    "remixmatch": ("remixmatch(ramp=0.25)", "", ALIGNED),
    "uda": ("uda", "", {}),
    "uda__tsa_exp": ("uda(annealing='exp')", "", {}),
    "uda__tsa_linear": ("uda(annealing='linear')", "", {}),
    "uda__tsa_log": ("uda(annealing='log')", "", {}),
    "fixmatch": ("fixmatch", "", {}),
    "fixmatch__soft": ("fixmatch(hard=False)", "", {}),
    "fixmatch_penalty": ("fixmatch", "margin(m=4)", {}),
    "flexmatch": ("flexmatch", "", {"learnt": "class_beta", "table": "label_table"}),
    "flexmatch__nowarmup": ("flexmatch(warmup=False)", "", {"learnt": "class_beta"}),
    "dash": ("dash(gamma=3.5, start=2.0, warmup=0, every=10)", "", {}),
    "crmatch": ("crmatch", "", {}),
    "comatch": (
        "comatch(threshold=0.7, contrast_threshold=0.5, queue=8, gate=10, bank=64, size=8)",
        "",
        CO_STATE,
    ),
    "simmatch": (SIM + ")", "", SIM_STATE),
    "simmatch__ema_teacher": (SIM + ", teacher=True)", "", SIM_STATE),
    "adamatch": ("adamatch(momentum=0.9)", "", ALIGNED),
    "adamatch__m999": ("adamatch", "", ALIGNED),
    "freematch": (FREE, "", FREE_STATE),
    "freematch__m999": ("freematch", "", FREE_STATE),
    "freematch__quantile_clip": (FREE[:-1] + ", quantile=True, clip=True)", "", FREE_STATE),
    "freematch_penalty": (FREE, "margin(m=4)", FREE_STATE),
    "softmatch": ("softmatch(momentum=0.9)", "", SOFT_STATE),
    "softmatch__m999": ("softmatch", "", SOFT_STATE),
    "softmatch__model_target": ("softmatch(momentum=0.9, uniform=False)", "", SOFT_STATE),
    "defixmatch": ("defixmatch", "", {}),
    "refixmatch": ("refixmatch", "", {}),
}
X_VIEWS = {"defixmatch": ("x_lb", "x_lb_s")}
U_VIEWS = {
    "pimodel": ("x_w", "x_w2"),
    "meanteacher": ("x_w", "x_w2"),
    "mixmatch": ("x_w", "x_w2"),
    "comatch": ("x_w", "x_s", "x_s2"),
    "remixmatch": ("x_w", "x_s", "x_s2"),
    "crmatch": ("x_w", "x_s", "x_rot0"),
}
EXTRA = {  # the reference's unweighted loss -> ours, and its weight
    "freematch": {"out_ent": ("fairness", None)},
    "vat": {"out_ent": ("entropy", 0.06)},
    "remixmatch": {"out_rot": ("rotation", 0.5)},
    "crmatch": {"out_ds": ("distance", 1.0), "out_rot": ("rotation", 1.0)},
    "comatch": {"out_contrast": ("contrast", 1.0)},
    "simmatch": {"out_instance": ("instance", 1.0)},
    "defixmatch": {"out_anti": ("anti", -0.5)},
    "refixmatch": {"out_refix": ("rejected", 1.0)},
}


class Recorded(nn.Module):
    """A given linear map that keeps the gradient at its outputs, whoever called it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.bias = torch.zeros(())
        self.calls: list[tuple[Tensor, Tensor]] = []

    def at(self, weight: Tensor, bias: Tensor | float = 0.0) -> None:
        self.weight, self.bias, self.calls = weight, bias, []

    def forward(self, rows: Tensor) -> Tensor:
        out = rows.flatten(1) @ self.weight + self.bias
        if torch._C._functorch.maybe_current_level() is None and not out.requires_grad:
            out.requires_grad_(torch.is_grad_enabled())
            if out.requires_grad:
                out.retain_grad()
                self.calls.append((rows.flatten(1), out))
        return out

    def gradient(self, rows: Tensor) -> Tensor:
        """Gradient at the outputs for these pictures, summed over the calls that saw them."""
        total = torch.zeros(len(rows), self.weight.shape[1], dtype=rows.dtype)
        for seen, out in self.calls:
            if out.grad is not None:
                same = (rows.flatten(1)[:, None] == seen[None]).all(-1).to(rows.dtype)
                total += same @ out.grad
        return total


class Linear(nn.Module):
    """The golden problem's network: logits and heads are given linear maps of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = Recorded()
        names = ("project", "distance", "rotation")
        self.heads = nn.ModuleDict({name: Recorded() for name in names})

    def at(self, file: Golden, step: int) -> None:
        self.logits.at(file["W"][step], file["b"][step])
        if "V" in file:
            self.heads["project"].at(file["V"][step])
        if "Vd" in file:
            self.heads["distance"].at(file["Vd"])
        if "R" in file:
            self.heads["rotation"].at(file["R"], file["r"])

    def teacher_at(self, file: Golden, step: int) -> None:
        """Averaged weights as they were before this step."""

        def before(name: str) -> Tensor:
            return file[f"state_{name}"][step - 1] if step else file[f"state0_{name}"]

        if "state_ema_W" in file:
            self.logits.at(before("ema_W"), before("ema_b"))
        else:
            self.logits.at(file["W"][step], file["b"][step])
        if "state_ema_V" in file:
            self.heads["project"].at(before("ema_V"))

    def forward(self, images: Tensor) -> Output:
        return Output(self.logits(images), images.flatten(1))


def task_of(file: Golden) -> Task:
    s = file.meta["sizes"]
    counts = (4,) * s["K"]
    if "lb_targets" in file:
        counts = tuple(torch.bincount(file["lb_targets"], minlength=s["K"]).tolist())
    return Task(s["K"], s["N_l"], s["N_u"], s["Fd"], s["T"], counts)


def batch_at(file: Golden, step: int, method: Method, name: str) -> Batch:
    base, sizes = name.split("_")[0], file.meta["sizes"]
    u = U_VIEWS.get(base, ("x_w", "x_s"))[: len(method.u_views)]
    rows = {"x": torch.arange(sizes["B"]), "u": torch.arange(sizes["Bu"])}
    return Batch(
        x=tuple(file[key][step] for key in X_VIEWS.get(base, ("x_lb",))),
        y=file["y_lb"][step],
        u=tuple(file[key][step] for key in u),
        x_id=file["idx_lb"][step] if "idx_lb" in file else rows["x"],
        u_id=file["idx_ulb"][step] if "idx_ulb" in file else rows["u"],
        step=torch.tensor(step),
        draws=draws_at(file, step, sizes["B"]),
    )


def draws_at(file: Golden, step: int, b: int) -> dict[str, Tensor]:
    """The reference's random draws, in the form our methods ask for."""
    draws = {}
    if "out_draw_d" in file:
        draws["u_noise"] = file["out_draw_d"][step]
    if "out_draw_beta" in file:
        keys = file["out_draw_perm"][step].argsort().double()  # whose order is the permutation
        draws |= {"beta": file["out_draw_beta"][step], "x_key": keys[:b]}
        draws["u_key"] = keys[b:].view(-1, b).T
    if "rot_v" in file:
        draws["u_turn"] = file["rot_v"][step]
    return draws


def prepare(name: str) -> tuple[Golden, Method, Linear, Linear, Objective]:
    file = Golden(f"methods/{name}")
    spec, penalty, _ = CASES[name]
    method = methods.build(spec, task_of(file)).double()
    if "state0_mem_bank" in file:
        method.commit({"bank": file["state0_mem_bank"].T})
    unlabelled = " + ".join(filter(None, [method.losses["unlabelled"], penalty]))
    net, ema = Linear(), Linear()
    labelled = losses.build(method.losses["labelled"])
    return file, method, net, ema, Objective(net, method, labelled, losses.build(unlabelled), ema)


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_memory_equal_the_reference_at_every_step(name):
    file, method, net, ema, objective = prepare(name)
    totals = file["out_total_conv" if "out_total_conv" in file else "out_total"]
    for step in range(file.meta["sizes"]["T"]):
        net.at(file, step)
        ema.teacher_at(file, step)
        values, state = objective(batch_at(file, step, method, name))
        values["loss"].backward()
        method.commit(state)
        assert values["loss"].item() == pytest.approx(float(totals[step]), abs=1e-6)
        assert values["labelled"].item() == pytest.approx(float(file["out_sup"][step]), abs=1e-6)
        compare_extra(file, step, values, method, name)
        compare_gradients(file, step, net, name)
        for ours, theirs in CASES[name][2].items():
            compare_memory(method.get_buffer(ours), file[f"state_{theirs}"][step], theirs)


def compare_extra(
    file: Golden, step: int, values: dict[str, Tensor], method: Any, name: str
) -> None:
    for theirs, (ours, weight) in EXTRA.get(name.split("_")[0], {}).items():
        factor = method.fairness if weight is None else weight
        expected = factor * float(file[theirs][step])
        assert values[ours].item() == pytest.approx(expected, abs=1e-6), ours


def compare_gradients(file: Golden, step: int, net: Linear, name: str) -> None:
    if "out_grad_logits_x" in file:  # mixed pictures: by order of the calls
        for call, key in enumerate(("x", "u")):
            close(net.logits.calls[call][1].grad, file[f"out_grad_logits_{key}"][step])
        if "out_grad_logits_s" in file:
            close(net.logits.calls[2][1].grad, file["out_grad_logits_s"][step])
    second = "x_w2" if "x_w2" in file else "x_s"
    views = {"lb": "x_lb", "lb_s": "x_lb_s", "w": "x_w", "s": second}
    for key, view in views.items() if "out_grad_logits_x" not in file else ():
        if f"out_grad_logits_{key}" in file:
            ours = net.logits.gradient(file[view][step])
            close(ours, file[f"out_grad_logits_{key}"][step])
    if "out_grad_logits_adv" in file:
        moved = file["x_w"][step] + file["out_r_adv"][step]
        seen, out = net.logits.calls[-1]
        torch.testing.assert_close(seen, moved.flatten(1), atol=1e-6, rtol=0)
        close(out.grad, file["out_grad_logits_adv"][step])
    if "out_grad_rot" in file:
        close(net.heads["rotation"].gradient(file["x_rot"][step]), file["out_grad_rot"][step])
        for view in ("w", "s"):
            ours = net.heads["distance"].gradient(file[f"x_{view}"][step])
            close(ours, file[f"out_grad_ds_{view}"][step])
    if "out_grad_logits_rot" in file:
        ours = net.heads["rotation"].gradient(file["x_s_rot"][step])
        close(ours, file["out_grad_logits_rot"][step])


def compare_memory(ours: Tensor, theirs: Tensor, name: str) -> None:
    if name == "mem_bank":
        theirs = theirs.T
    if name == "label_table":  # we count "unused" as the class after the last
        theirs = torch.where(theirs < 0, 10, theirs)
    close(ours, theirs.to(ours.dtype))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "name", [name for name in CASES if "out_mask" in Golden(f"methods/{name}")]
)
def test_the_same_pictures_are_accepted_with_the_same_targets(name):
    file, method, net, ema, _ = prepare(name)
    for step in range(file.meta["sizes"]["T"]):
        net.at(file, step)
        ema.teacher_at(file, step)
        plan = method(net, ema, batch_at(file, step, method, name))
        method.commit(plan.state)
        ramp = float(plan.unlabelled.weight.max() > 0)  # a ramp starts at zero
        mask = file["out_mask"][step]
        if name.startswith("softmatch"):
            close(plan.unlabelled.weight, mask)
        elif ramp:
            assert torch.equal((plan.unlabelled.weight > 0).double(), mask.double())
        target = file["out_target"][step]
        close(plan.unlabelled.target.double(), target.double())


@pytest.mark.parametrize("name", ["comatch", "simmatch", "simmatch__ema_teacher"])
def test_gradients_at_the_embeddings_equal_the_reference(name, monkeypatch):
    file, method, net, ema, objective = prepare(name)
    made: list[Tensor] = []
    unit = ops.unit

    def recorded(features: Tensor) -> Tensor:
        made.append(unit(features))
        if made[-1].requires_grad:
            made[-1].retain_grad()
        return made[-1]

    monkeypatch.setattr(ops, "unit", recorded)
    for step in range(file.meta["sizes"]["T"]):
        net.at(file, step)
        ema.teacher_at(file, step)
        made.clear()
        values, state = objective(batch_at(file, step, method, name))
        values["loss"].backward()
        method.commit(state)
        views = [v for v in ("lb", "w", "s", "s2") if f"out_grad_feat_{v}" in file]
        theirs = torch.cat([file[f"out_grad_feat_{view}"][step] for view in views])
        close(torch.zeros_like(made[0]) if made[0].grad is None else made[0].grad, theirs)


@pytest.mark.parametrize("name", ["bam", "bam_uda"])
def test_bam_equals_its_reference_with_the_right_gradients(name):
    file = Golden(name)
    meta = file.meta
    settings = f"samples={meta['bayes_samples']}, warmup={meta['quantile_warmup_steps']}"
    if meta["uda_T"]:
        settings += f", on='uda', temperature={meta['uda_T']}"
    task = Task(meta["K"], 40, 64, meta["D"], meta["T"], (4,) * meta["K"])
    method = methods.build(f"bam({settings})", task).double()
    plain = losses.build("cross_entropy")
    net = Identity(meta["D"], meta["K"])
    objective = Objective(net, method, plain, plain)
    layer = net.heads["bayes"]
    for step in range(meta["T"]):
        for key in ("mu_weight", "mu_bias", "rho_weight", "rho_bias"):
            getattr(layer, key).data = file[key][step]
        layer.zero_grad()
        assert float(method.get_buffer("spread")) == pytest.approx(
            float(file["out_threshold_before"][step]), abs=1e-6
        )
        features = [file[f"feat_{view}"][step].requires_grad_() for view in ("lb", "w", "s")]
        draws = {key: file[f"draw_{key}"][step] for key in ("eps_weight", "eps_bias")}
        ids = torch.arange(8)
        y = file["y_lb"][step]
        batch = Batch((features[0],), y, tuple(features[1:]), ids, ids, torch.tensor(step), draws)
        values, state = objective(batch)
        values["loss"].backward()
        method.commit(state)
        assert values["loss"].item() == pytest.approx(float(file["out_total"][step]), abs=1e-6)
        assert values["accepted"].item() == pytest.approx(float(file["out_mask"][step].mean()))
        for key, suffix in (("mu", ""), ("rho", "_correct")):
            for part in ("weight", "bias"):
                expected = file[f"out_grad_{key}_{part}{suffix}"][step]
                close(getattr(layer, f"{key}_{part}").grad, expected)
        gradients = [torch.zeros_like(f) if f.grad is None else f.grad for f in features]
        close(torch.cat(gradients), file["out_grad_feat"][step])
        after = float(file["out_threshold_after"][step])
        assert float(method.get_buffer("spread")) == pytest.approx(after, abs=1e-6)


class Identity(nn.Module):
    """Pictures that are features already."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"bayes": Bayes(features, classes).double()})

    def forward(self, images: Tensor) -> Output:
        return Output(images[:, :1], images)


def test_hard_pseudo_labels_split_the_unlabelled_loss_into_pseudo_ce_and_min_entropy():
    """The paper's equation: cross-entropy on U' and min-entropy on U'' make up the loss."""
    file, method, net, _, objective = prepare("fixmatch")
    seen = torch.zeros(2)
    for step in range(file.meta["sizes"]["T"]):
        net.at(file, step)
        values, _ = objective(batch_at(file, step, method, "fixmatch"))
        parts = values["pseudo_ce"] + values["min_entropy"]
        assert parts.item() == pytest.approx(values["unlabelled"].item(), abs=1e-12)
        seen += torch.tensor([values["pseudo_ce"] > 0, values["min_entropy"] > 0])
    assert (seen > 0).all()
