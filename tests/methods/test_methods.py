"""Properties that every method has, by being a Method; a new one gets these tests free."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ranks
from calmatch import cli, load_run, losses, methods, train
from calmatch.core import Batch, Method, Objective, Plan, Task, frozen
from calmatch.methods.fixmatch import FixMatch
from calmatch.training import checkpoint, recipes
from calmatch.training.setup import build_parts
from calmatch.training.step import make_training
from conftest import ALL_METHODS, ALONE

PENALTY = "margin(m=1)"  # a margin that acts from the first step


def penalty(method: str) -> str:
    return "" if method == "supervised" else PENALTY


def start(config):
    return make_training(config, build_parts(config))


@pytest.mark.parametrize("method", ALL_METHODS)
def test_the_step_is_one_graph_and_compiled_equals_eager(tiny, method):
    # one that the others build on, and one that differentiates inside; inductor traces them all
    backend = "aot_eager" if method in ("fixmatch", "vat") else "eager"
    _compare_compiled(tiny(method, precision="fp64", penalty=penalty(method)), backend, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", ALL_METHODS)
def test_inductor_equals_eager(tiny, method):
    close = 1e-5 if method == "vat" else 1e-9  # a finite difference with steps of 1e-6
    _compare_compiled(tiny(method, precision="fp64", penalty=penalty(method)), "inductor", close)


def _compare_compiled(config, backend, tolerance):
    torch._dynamo.reset()
    eager, compiled = start(config), start(config)
    compiled.objective.compile(fullgraph=True, backend=backend)
    for step in range(12):
        losses_and_gradients = []
        for run in (eager, compiled):
            values, state = run.objective(run.parts.batches[step])
            values["loss"].backward()
            run.parts.method.commit(state)
            gradients = [p.grad.clone() for p in run.parts.net.parameters() if p.grad is not None]
            losses_and_gradients.append((dict(values), gradients))
            run.optimizer.step()
            run.optimizer.zero_grad()
        torch.testing.assert_close(*losses_and_gradients, atol=tolerance, rtol=tolerance)


def on_meta(config, method_class=None):
    """The objective and a batch on a device without values: reading one is an error."""
    parts = build_parts(config)
    method = method_class(parts.method.task) if method_class else parts.method
    objective = Objective(
        parts.net,
        method,
        parts.labelled_loss,
        parts.unlabelled_loss,
        copy.deepcopy(parts.net).requires_grad_(False),
        parts.truth,
    ).to("meta")
    batch = parts.batches[0]
    meta = Batch(
        *(
            tuple(t.to("meta") for t in part)
            if isinstance(part, tuple)
            else {k: t.to("meta") for k, t in part.items()}
            if isinstance(part, dict)
            else part.to("meta")
            for part in batch
        )
    )
    return objective, meta


@pytest.mark.parametrize("method", ALL_METHODS)
def test_nothing_in_the_step_waits_for_a_value(tiny, method):
    objective, batch = on_meta(tiny(method, penalty=penalty(method)))
    values, state = objective(batch)
    values["loss"].backward()
    objective.method.commit(state)
    assert values["loss"].device.type == "meta"


def test_a_method_that_waits_for_a_value_is_noticed(tiny):
    class Waiting(FixMatch):
        def select(self, p, batch):
            assert p.amax().item() >= 0
            return super().select(p, batch)

    objective, batch = on_meta(tiny(), Waiting)
    with pytest.raises(RuntimeError, match=r"[Mm]eta"):
        objective(batch)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_a_stopped_run_continues_bit_for_bit(tiny, tmp_path, method):
    config = tiny(method, steps=10, ema=0.9, penalty=penalty(method))
    whole, before, after = start(config), start(config), start(config)
    for _ in range(10):
        whole.advance()
    for _ in range(6):  # in the middle of a chunk and of a log interval
        before.advance()
    note = {"sums": before.sums.steps, "best": None, "best_step": None}
    checkpoint.save_checkpoint(tmp_path, before.step, before.tensors(), note)
    state, complaints = checkpoint.newest_checkpoint(tmp_path)
    after.restore(*state)
    assert not complaints
    for _ in range(4):
        after.advance()
    first, second = whole.tensors(), after.tensors()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Every method trained by two real processes on half batches each, its state by name.

    pytest-xdist's workers share the folder: the first to make it does the work.
    """
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    out = tmp_path_factory.getbasetemp().parent / f"ranks-{session}"
    try:
        out.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + 300
        while not (out / "done").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        return out
    command = [sys.executable, str(Path(__file__).parents[1] / "ranks.py"), str(out)]
    other = subprocess.Popen(command, stderr=subprocess.PIPE, env={**ALONE, "RANK": "1"})
    try:
        ranks.main(out, 0)  # the first rank is this process
    finally:
        errors = other.communicate(timeout=250)[1].decode()
        (out / "done").touch()
    assert other.returncode == 0, errors
    return out


@pytest.mark.ddp
@pytest.mark.parametrize("method", ALL_METHODS)
def test_two_ranks_on_half_batches_equal_one_process(two_ranks, method):
    together = load_file(two_ranks / f"{method}.safetensors")
    if method in ranks.EXEMPT:
        assert all(torch.isfinite(value).all() for value in together.values())
        return
    alone = ranks.state(method)
    assert alone.keys() == together.keys()
    close = 1e-5 if method == "vat" else 1e-9  # a finite difference with steps of 1e-6
    for name in alone:
        torch.testing.assert_close(alone[name], together[name], atol=close, rtol=close, msg=name)


@pytest.mark.ddp
def test_two_ranks_write_the_run_of_one_process(two_ranks, tmp_path):
    ranks.compare(train(ranks.CONFIG, tmp_path / "one", quiet=True), load_run(two_ranks / "run"))


@pytest.mark.parametrize("method", ALL_METHODS)
def test_methods_own_no_parameters_and_forward_writes_no_memory(tiny, method):
    run = start(tiny(method))
    assert not list(run.parts.method.parameters())
    memory = {k: v.clone() for k, v in run.parts.method.state_dict().items()}
    _, state = run.objective(run.parts.batches[0])
    assert all(torch.equal(memory[k], v) for k, v in run.parts.method.state_dict().items())
    assert set(state) <= set(memory)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_loss_works_on_the_terms_of_every_method(method, tiny):
    run = start(tiny(method))
    plan = run.parts.method(run.parts.net, run.parts.ema, run.parts.batches[0])
    assert isinstance(plan, Plan)
    assert isinstance(run.parts.method, Method)
    assert plan.labelled.logits.requires_grad
    for loss in losses.LOSSES.values():
        for term in (plan.labelled, plan.unlabelled):
            assert term is None or torch.isfinite(loss(term))


@pytest.mark.parametrize(
    ("sharp", "ratio"),
    [(0.01, 1), (0.01, 7), (1000.0, 3)],
    ids=["nothing accepted", "nothing accepted of many", "everything accepted"],
)
@pytest.mark.parametrize("method", ALL_METHODS)
def test_nothing_becomes_nan_at_the_edges(tiny, method, sharp, ratio):
    """Batches of three of four classes' pictures, all rejected or all accepted, any R / B."""
    config = tiny(method, batch=3, ratio=ratio, steps=8, ema=0.9, penalty=penalty(method), lr=1e-4)
    run = start(config)
    with torch.no_grad():
        run.parts.net.body.head.weight *= sharp
    while run.step < 8:
        run.advance()
    assert all(torch.isfinite(value).all() for value in run.tensors().values())


@pytest.mark.parametrize(
    ("method", "memory"),
    [
        ("fixmatch", {}),
        ("flexmatch", {"learnt": 1.0}),
        ("freematch", {"overall": 2000.0}),
        ("bam", {"spread": -1.0}),
        ("comatch", {}),
        ("simmatch", {}),
        ("shrinkmatch", {}),
    ],
)
def test_losses_and_gradients_stay_finite_when_nothing_at_all_is_accepted(tiny, method, memory):
    run = start(tiny(method, penalty=penalty(method)))
    run.parts.method.commit({name: torch.tensor(value) for name, value in memory.items()})
    with torch.no_grad():
        run.parts.net.body.head.weight.zero_()
    values, _ = run.objective(run.parts.batches[0])
    values["loss"].backward()
    assert values["accepted"].item() == 0
    assert all(torch.isfinite(value).all() for value in values.values())
    gradients = [p.grad for p in run.parts.net.parameters() if p.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


FIRST_ONLY = ("pseudolabel", "pimodel", "meanteacher", "vat", "mixmatch", "remixmatch")


@pytest.mark.parametrize("method", ALL_METHODS)
def test_batch_norm_follows_one_forward_of_the_step(tiny, method):
    """All views together, or for some methods the labelled pictures (or their mixtures) alone."""
    run = start(tiny(method, net="small(width=4)", ema=0.9))
    norm = run.parts.net.body.layers[0][1]
    seen = []
    norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    before = norm.running_mean.clone()
    run.objective(run.parts.batches[0])
    assert int(norm.num_batches_tracked) == 1
    expected = torch.lerp(before, seen[_first(seen, method)].mean((0, 2, 3)), norm.momentum)
    torch.testing.assert_close(norm.running_mean, expected)


def _first(seen: list[torch.Tensor], method: str) -> int:
    """The forward that moves the statistics: the first over as many rows as are labelled."""
    if method not in FIRST_ONLY:
        assert len(seen) == 1
        return 0
    return next(k for k, rows in enumerate(seen) if len(rows) == 8)


@pytest.mark.slow
@pytest.mark.parametrize("with_penalty", ["", "margin(m=10)"], ids=["plain", "margin"])
@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_method_learns_digits(tmp_path, method, with_penalty):
    if method == "supervised" and with_penalty:
        return  # it has no unlabelled side
    config = recipes.digits_40(method, penalty=with_penalty, steps=300)
    run = train(config, tmp_path / "run", quiet=True)
    assert run.result.metrics["error"].value < 0.35  # chance is 0.9
    assert all(math.isfinite(line["loss"]) for line in run.lines())


def test_vat_finds_the_right_direction_in_float32(tiny):
    """The reference's step of 1e-6 is below rounding there; its directions are noise."""
    run = start(tiny("vat", net="small(width=8)"))
    images, noise = run.parts.batches[0].u[0], run.parts.batches[0].draws["u_noise"]
    directions = {}
    for dtype, xi in ((torch.float64, None), (torch.float32, None), (torch.float32, 1e-6)):
        net = copy.deepcopy(run.parts.net).to(dtype)
        method = copy.deepcopy(run.parts.method)
        method.xi = xi
        with frozen(net):
            q = net(images.to(dtype)).logits.detach().softmax(-1)
            direction = method.direction(net, images.to(dtype), q, noise.to(dtype))
        directions[dtype, xi] = direction.double().flatten(1)
    exact = directions[torch.float64, None]
    assert (exact * directions[torch.float32, None]).sum(1).median() > 0.99
    assert (exact * directions[torch.float32, 1e-6]).sum(1).median() < 0.9


def test_bam_predicts_the_mean_of_its_draws(tiny):
    run = start(tiny("bam(samples=5)"))
    net, method = run.parts.net, run.parts.method
    images = run.parts.batches[0].x[0]
    layer, features = net.heads["bayes"], net(images).features
    draws = [
        layer(features, method.predict_weight[k : k + 1], method.predict_bias[k : k + 1])[0]
        for k in range(5)
    ]
    mean = torch.stack([draw.softmax(-1) for draw in draws]).mean(0)
    torch.testing.assert_close(method.predict(net, images).exp(), mean)
    rates = {
        g["peak"] for g in run.optimizer.param_groups for p in g["params"] if p is layer.mu_bias
    }
    assert rates == {0.01}


def test_shrinkmatch_shrinks_to_the_least_likely_classes_that_leave_the_top_sure(tiny):
    method = methods.build("shrinkmatch", Task(5, 10, 50, 8, 100, (2,) * 5)).double()
    p = torch.tensor([[0.5, 0.3, 0.18, 0.012, 0.008], [0.3, 0.25, 0.2, 0.15, 0.1]]).double()
    logits = torch.randn(2, 5, dtype=torch.float64)
    # first row: 0.5 / (0.5 + 0.02) = 0.96 is sure once the classes from the fourth on remain
    chosen = logits[0, [0, 3, 4]]
    expected = 0.5 * (chosen.logsumexp(0) - chosen[0])
    # second row: 0.3 / (0.3 + 0.1) = 0.75 is never sure
    loss = method.shrunk(p, logits)
    torch.testing.assert_close(loss, torch.stack([expected, torch.zeros_like(expected)]))


def test_shrinkmatch_reaches_across_the_order_of_classes(tiny):
    method = methods.build("shrinkmatch", Task(4, 10, 50, 8, 100, (2,) * 4)).double()
    p = torch.tensor([[0.02, 0.6, 0.36, 0.02]]).double()  # 0.6 / 0.64 = 0.94, 0.6 / 0.62 = 0.97
    logits = torch.randn(1, 4, dtype=torch.float64)
    last = 3 if p.sort(-1, descending=True).indices[0, -1] == 3 else 0
    chosen = logits[0, [1, last]]
    torch.testing.assert_close(method.shrunk(p, logits)[0], 0.6 * (chosen.logsumexp(0) - chosen[0]))


def test_dash_measures_its_starting_loss_on_labelled_pictures(tiny):
    run = start(tiny("dash(warmup=3, every=2)", net="tiny"))
    method, seen = run.parts.method, []
    for step in range(5):
        batch = run.parts.batches[step]
        logits = run.parts.net(batch.x[0]).logits.detach()
        seen.append(torch.nn.functional.cross_entropy(logits, batch.y))
        plan = method(run.parts.net, run.parts.ema, batch)
        method.commit(plan.state)
        assert (plan.unlabelled.weight == 0).all() or step >= 3
    torch.testing.assert_close(method.loss, torch.stack(seen[:3]).mean())
    thresholds = [float(method.threshold_at(torch.tensor(t), torch.tensor(1.0))) for t in (3, 5, 7)]
    assert thresholds == pytest.approx([1.0001 / 1.27**n for n in range(3)])


def paper(tiny, method):
    run = start(tiny(method, precision="fp64", steps=4))
    batch = run.parts.batches[2]
    x, w, s = (run.parts.net(view).logits.detach() for view in (*batch.x, *batch.u))
    return run, batch, run.parts.method(run.parts.net, run.parts.ema, batch), (x, w, s)


def test_the_papers_uda_sharpens_its_target(tiny):
    _, _, plan, (_, w, _) = paper(tiny, "uda(threshold=0.0, faithful='paper')")
    torch.testing.assert_close(plan.unlabelled.target, (w / 0.4).softmax(-1))


def test_the_papers_refixmatch_compares_softened_logits(tiny):
    _, _, plan, (_, w, s) = paper(tiny, "refixmatch(faithful='paper')")
    target, logp = (w / 0.5).log_softmax(-1), (s / 0.5).log_softmax(-1)
    rejected = (w.softmax(-1).amax(-1) < 0.95).double()
    expected = (rejected * (target.exp() * (target - logp)).sum(-1)).mean()
    torch.testing.assert_close(plan.extra["rejected"].detach(), expected)


def test_the_papers_simmatch_keeps_rows_of_its_bank_at_length_one(tiny):
    _, batch, plan, _ = paper(tiny, "simmatch(faithful='paper')")
    rows = plan.state["bank"][batch.x_id]
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows), dtype=rows.dtype))


def test_the_papers_adamatch_starts_slowly_and_mixes_labelled_logits(tiny):
    _, batch, plan, (x, _, _) = paper(tiny, "adamatch(threshold=0.0, faithful='paper')")
    # step 2 of 4: 1/2 - cos(pi)/2 = 1; both forwards agree without BatchNorm
    torch.testing.assert_close(plan.unlabelled.weight, torch.ones_like(plan.unlabelled.weight))
    torch.testing.assert_close(plan.labelled.logits.detach(), x)
    assert batch.draws["x_mix"].shape == x.shape


def test_paper_and_usb_differ_where_they_should(tiny):
    for name in ("uda(threshold=0.0,", "simmatch(", "adamatch(", "refixmatch("):
        plans = []
        for faithful in ("usb", "paper"):
            run = start(tiny(f"{name}faithful='{faithful}')"))
            run.advance(run.parts.batches[0])
            values, _ = run.objective(run.parts.batches[1])
            plans.append(values["loss"].item())
        assert plans[0] != plans[1], name


def test_a_method_from_outside_trains_by_its_dotted_name(typed, tmp_path, monkeypatch):
    package = tmp_path / "outside"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mine.py").write_text(
        "import torch\n"
        "from calmatch.methods.fixmatch import FixMatch\n"
        "class Mine(FixMatch):\n"
        "    '''Trusts more than usual confidence.'''\n"
        "    def __init__(self, task, *, momentum: float = 0.9):\n"
        "        super().__init__(task, threshold=0.0)\n"
        "        self.momentum = momentum\n"
        "        self.remember(usual=torch.tensor(1 / task.classes))\n"
        "    def select(self, p, batch):\n"
        "        usual = self.momentum * self.usual + (1 - self.momentum) * p.amax(-1).mean()\n"
        "        return (p.amax(-1) >= usual).to(p.dtype), {'usual': usual}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = "train digits_40 --dataset synthetic --labels 16 --net tiny --steps 30 --weak crop(1)"
    method = ["--method", "outside.mine.Mine(momentum=0.8)", "--out", tmp_path / "run"]
    answer = typed(*words.split(), *method)
    assert answer.returncode == 0, answer.stderr
    assert "outside.mine.Mine" in (tmp_path / "run" / "result.json").read_text()


@pytest.mark.parametrize(
    ("text", "steps", "expected"),
    [
        ("freematch", 2_000, "freematch(momentum=0.975)"),
        ("softmatch(sigmas=3)", 1_000, "softmatch(sigmas=3, momentum=0.95)"),
        ("adamatch", 30, "adamatch(momentum=0.9)"),  # never less than ten batches
        ("freematch", 50_000, "freematch"),  # published schedules keep the published memory
        ("freematch(momentum=0.999)", 500, "freematch(momentum=0.999)"),  # who asks gets it
        ("fixmatch", 500, "fixmatch"),
        ("simmatch", 500, "simmatch"),
    ],
)
def test_a_short_run_has_a_short_memory(text, steps, expected):
    assert methods.adapt_momentum(text, steps) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["eurosat_40", "--method", "freematch(momentum=0.5)"], "freematch(momentum=0.5)"),
        (["eurosat_40", "--method", "simmatch"], "simmatch(temperature=0.2)"),
        (
            ["eurosat_40", "--method", "simmatch(faithful='paper')"],
            "simmatch(temperature=0.2, faithful='paper')",
        ),
        (["eurosat_40", "--method", "simmatch(temperature=0.3)"], "simmatch(temperature=0.3)"),
        (["eurosat_40", "--method", "simmatch(0.95, 0.3)"], "simmatch(0.95, 0.3)"),
        (["stl10_40", "--method", "comatch(size=32)"], "comatch(contrast=5.0, size=32)"),
        (["cifar100_200", "--method", "dash"], "dash(faithful='usb')"),
        (["digits_40", "--method", "dash"], "dash"),
        (["cifar10_40", "--method", "simmatch"], "simmatch(gate=1024)"),
        (["cifar10_40", "--method", "bam"], "bam(warmup=10240, quantile=0.95, lr=0.005)"),
        (["cifar100_lt_wrn_10_10", "--method", "comatch"], "comatch(gate=1024)"),
        (["digits_40"], "fixmatch"),
    ],
)
def test_the_command_line_leaves_a_recipes_arguments_to_the_recipe(words, expected):
    assert cli._train_options(words).run.method == expected


def test_a_strangers_method_keeps_its_momentum(monkeypatch, tmp_path):
    (tmp_path / "strange.py").write_text(
        "from calmatch.methods.fixmatch import FixMatch\n"
        "class Mine(FixMatch):\n"
        "    def __init__(self, task, *, momentum: float | None = None):\n"
        "        super().__init__(task)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert methods.adapt_momentum("strange.Mine", 500) == "strange.Mine"


def test_a_short_run_of_freematch_stops_believing_every_guess():
    """With the published memory the threshold of a run of 500 steps is still low at its end."""
    task = Task(10, 40, 100, 8, 500, (4,) * 10)
    confidence = {}
    for text in ("freematch", methods.adapt_momentum("freematch", 500)):
        method = methods.build(text, task)
        p = torch.full((64, 10), 0.02)
        p[:, 0] = 0.82
        for _ in range(100):
            _, state = method.select(p, None)
            method.commit(state)
        confidence[text] = float(method.get_buffer("overall"))
    assert list(confidence.values()) == pytest.approx([0.169, 0.82], abs=0.01)
