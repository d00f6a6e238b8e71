"""Every method against step-by-step traces of its reference implementation.

The traces are read from tests/golden, or from any other such folder:
`CALMATCH_GOLDEN=folder pytest -k golden`. Every setting comes from the file's own meta.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calmatch import losses, methods, ops
from calmatch.core import Batch, Method, Objective, Output, Task
from calmatch.methods.bam import Bayes
from conftest import GOLDEN, Golden

CASES = sorted(path.stem for path in (GOLDEN / "methods").glob("*.npz"))
OURS = {  # the reference's name of a setting -> ours
    "p_cutoff": "threshold",
    "contrast_p_cutoff": "contrast_threshold",
    "ulb_loss_ratio": "weight",
    "contrast_loss_ratio": "contrast",
    "in_loss_ratio": "instance",
    "kl_loss_ratio": "unmixed",
    "rot_loss_ratio": "rotation",
    "unsup_warm_up": "ramp",
    "T": "temperature",
    "ema_p": "momentum",
    "mixup_alpha": "alpha",
    "hard_label": "hard",
    "smoothing_alpha": "smoothing",
    "da_len": "queue",
    "proj_size": "size",
    "num_iter_per_epoch": "gate",
    "thresh_warmup": "warmup",
    "num_wu_iter": "warmup",
    "use_quantile": "quantile",
    "clip_thresh": "clip",
    "n_sigma": "sigmas",
    "dist_uniform": "uniform",
    "vat_eps": "eps",
    "tsa_schedule": "annealing",
    "rho_min": "least",
    "C": "factor",
    "gamma": "gamma",
}
MEMORY = {  # ours -> the reference's name
    "flexmatch": {"learnt": "class_beta", "table": "label_table"},
    "freematch": {"overall": "time_p", "mean": "p_model", "histogram": "label_hist"},
    "adamatch": {"mean": "p_model", "target": "p_target"},
    "remixmatch": {"mean": "p_model", "target": "p_target"},
    "softmatch": {"mean": "p_model", "target": "p_target", "centre": "mu", "spread": "var"},
    "simmatch": {
        "bank": "mem_bank",
        "labels": "labels_bank",
        "queue": "da_queue",
        "queue_place": "da_ptr",
    },
    "comatch": {
        "features": "queue_feats",
        "probs": "queue_probs",
        "place": "queue_ptr",
        "queue": "da_queue",
        "queue_place": "da_ptr",
    },
}


def settings_of(file: Golden) -> dict[str, Any]:
    """Our method's arguments, from what the file says of the reference's."""
    name, hyper, sizes = file.meta["method"].split("_")[0], file.meta["hyper"], file.meta["sizes"]
    takes = inspect.signature(methods.METHODS[name]).parameters
    settings = {OURS[k]: v for k, v in hyper.items() if OURS.get(k) in takes}
    if name == "crmatch":
        settings["weight"] = 1.0  # which the reference reads and ignores
    if name == "freematch":
        settings["fairness"] = hyper["ent_loss_ratio"]
    if name == "vat":
        settings["entropy"] = hyper["ent_loss_ratio"]
    if name == "comatch":
        settings["bank"] = hyper["queue_batch"] * (sizes["B"] + sizes["Bu"])
    if name == "simmatch":
        settings["teacher"] = hyper["dataset"] in ("stl10", "imagenet")
    if name == "dash":
        settings["start"] = float(re.search(r"rho_init=([\d.]+)", file.meta["note"])[1])
        settings["every"] = 10 * hyper["num_iter_per_epoch"]
    return settings


X_VIEWS = {"defixmatch": ("x_lb", "x_lb_s")}
U_VIEWS = {
    "pimodel": ("x_w", "x_w2"),
    "meanteacher": ("x_w", "x_w2"),
    "mixmatch": ("x_w", "x_w2"),
    "comatch": ("x_w", "x_s", "x_s2"),
    "remixmatch": ("x_w", "x_s", "x_s2"),
    "crmatch": ("x_w", "x_s", "x_rot0"),
}
EXTRA = {  # the reference's unweighted loss -> ours, and the setting (or number) that weighs it
    "freematch": {"out_ent": ("fairness", "fairness")},
    "vat": {"out_ent": ("entropy", "entropy")},
    "remixmatch": {"out_rot": ("rotation", "rotation")},
    "crmatch": {"out_ds": ("distance", 1.0), "out_rot": ("rotation", 1.0)},
    "comatch": {"out_contrast": ("contrast", "contrast")},
    "simmatch": {"out_instance": ("instance", "instance")},
    "defixmatch": {"out_anti": ("anti", "weight")},
    "refixmatch": {"out_refix": ("rejected", "weight")},
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
        """Gradient at the outputs for these images, summed over the calls that saw them."""
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
    counts = (s["N_l"] // s["K"],) * s["K"]
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
        draws=draws_at(file, step),
    )


def draws_at(file: Golden, step: int) -> dict[str, Tensor]:
    """The reference's random draws, in the form our methods ask for."""
    draws, b, r = {}, file.meta["sizes"]["B"], file.meta["sizes"]["Bu"]
    if "out_draw_d" in file:
        draws["u_noise"] = file["out_draw_d"][step]
    if "out_draw_beta" in file:
        keys = file["out_draw_perm"][step].argsort().double()  # whose order is the permutation
        draws |= {"beta": file["out_draw_beta"][step], "x_key": keys[:b]}
        draws["u_key"] = keys[b:].view(-1, r).T
    if "rot_v" in file:
        draws["u_turn"] = file["rot_v"][step]
    return draws


def prepare(name: str) -> tuple[Golden, Method, Linear, Linear, Objective]:
    file = Golden(f"methods/{name}")
    hyper = file.meta["hyper"]
    kind = methods.METHODS[name.split("_")[0]]
    method = kind(task_of(file), **settings_of(file)).double()
    if "state0_mem_bank" in file:
        method.commit({"bank": file["state0_mem_bank"].T})
    penalty = ""
    if "p_margin" in hyper:
        penalty = f" + margin(m={hyper['margin_hyperparam']}, weight={hyper['p_margin']})"
    net, ema = Linear(), Linear()
    labelled = losses.build(method.losses["labelled"])
    unlabelled = losses.build(method.losses["unlabelled"] + penalty)
    return file, method, net, ema, Objective(net, method, labelled, unlabelled, ema)


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
        compare_extra(file, step, values, name)
        compare_gradients(file, step, net, name)
        for ours, theirs in MEMORY.get(name.split("_")[0], {}).items():
            if f"state_{theirs}" in file:
                compare_memory(method.get_buffer(ours), file[f"state_{theirs}"][step], theirs, file)


def compare_extra(file: Golden, step: int, values: dict[str, Tensor], name: str) -> None:
    for theirs, (ours, weight) in EXTRA.get(name.split("_")[0], {}).items():
        factor = settings_of(file)[weight] if isinstance(weight, str) else weight
        expected = (-factor if ours == "anti" else factor) * float(file[theirs][step])
        assert values[ours].item() == pytest.approx(expected, abs=1e-6), ours


def compare_gradients(file: Golden, step: int, net: Linear, name: str) -> None:
    if "out_grad_logits_x" in file:  # mixed images: by order of the calls
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


def compare_memory(ours: Tensor, theirs: Tensor, name: str, file: Golden) -> None:
    if name == "mem_bank":
        theirs = theirs.T
    if name == "label_table":  # we count "unused" as the class after the last
        theirs = torch.where(theirs < 0, file.meta["sizes"]["K"], theirs)
    close(ours, theirs.to(ours.dtype))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "name", [name for name in CASES if "out_mask" in Golden(f"methods/{name}")]
)
def test_the_same_images_are_accepted_with_the_same_weights_and_targets(name):
    file, method, net, ema, _ = prepare(name)
    settings, steps = settings_of(file), file.meta["sizes"]["T"]
    accepted = 0.0
    for step in range(steps):
        net.at(file, step)
        ema.teacher_at(file, step)
        plan = method(net, ema, batch_at(file, step, method, name))
        method.commit(plan.state)
        ramp = min(1.0, step / (settings["ramp"] * steps)) if "ramp" in settings else 1.0
        expected = settings["weight"] * ramp * file["out_mask"][step].double()
        close(plan.unlabelled.weight, expected)
        close(plan.unlabelled.target.double(), file["out_target"][step].double())
        accepted += float(expected.sum())
    assert accepted > 0, "a trace in which nothing is accepted compares nothing"


def test_comatch_smooths_from_the_later_of_its_gate_and_a_full_bank():
    """The golden trace's gate comes after its bank is full; the other order is compared here."""
    file = Golden("methods/comatch")
    sizes = file.meta["sizes"]
    settings = settings_of(file) | {"gate": 1}
    full = settings["bank"] // (sizes["B"] + sizes["Bu"])
    method = methods.METHODS["comatch"](task_of(file), **settings).double()
    for gate in (1, full + 3):
        method.gate = gate
        features = ops.unit(torch.randn(sizes["Bu"], settings["size"]).double())
        p = torch.rand(sizes["Bu"], sizes["K"]).double().softmax(-1)
        method.get_buffer("features").normal_()
        method.get_buffer("probs").uniform_()
        near = (features @ method.get_buffer("features").T / method.temperature).softmax(-1)
        mixed = 0.9 * p + 0.1 * near @ method.get_buffer("probs")
        for step in range(full + 6):
            batch = batch_at(file, step, method, "comatch")
            expected = mixed if step >= gate and step > full else p
            close(method.smooth(p, features, batch), expected)


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
    settings = {
        "samples": meta["bayes_samples"],
        "threshold": meta["std_threshold_init"],
        "warmup": meta["quantile_warmup_steps"],
        "first_quantile": meta["init_quan"],
        "quantile": meta["final_quan"],
        "memory": meta["queue_len"],
        "kl": meta["kl"],
    }
    if meta["uda_T"]:
        settings |= {"on": "uda", "temperature": meta["uda_T"]}
    task = Task(meta["K"], 40, 64, meta["D"], meta["T"], (4,) * meta["K"])
    method = methods.METHODS["bam"](task, **settings).double()
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
        y = file["y_lb"][step]
        x_id, u_id = torch.arange(meta["B"]), torch.arange(meta["Bu"])
        views = (features[0],), y, tuple(features[1:])
        batch = Batch(*views, x_id, u_id, torch.tensor(step), draws)
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
    """Images that are features already."""

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
