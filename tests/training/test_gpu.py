"""What needs a CUDA device: `pytest -m gpu` there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_nonfinite import LR, steep

from calmatch import augment, console, train
from calmatch.fit import fit
from calmatch.methods.fixmatch import FixMatch
from calmatch.options import FitOptions
from calmatch.training import checkpoint
from calmatch.training.cuda_graph import CapturedStep
from calmatch.training.setup import build_parts, deterministic
from calmatch.training.step import Predictor, make_training, new_training
from conftest import ALL_METHODS
from pictures import blobs
from test_augment import BATCH, PHOTOS, assert_pillows, pillow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::UserWarning"),  # torch's advice on a GPU is no fault
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", augment.RANDAUGMENT)
def test_operations_on_the_gpu_are_pillows(name, compiled):
    low, high = augment.RANGES[name]
    op = torch.full((len(BATCH),), augment.RANDAUGMENT.index(name), device="cuda")
    apply = augment.apply_operations
    apply = torch.compile(apply, fullgraph=True) if compiled else apply
    for share in (0.0, 0.37, 0.71, 0.999):
        values = torch.full((len(BATCH),), low + (high - low) * share, device="cuda")
        ours = apply(BATCH.cuda(), op, values).cpu()
        pictures = [np.array(pillow(name, p, float(values[0]))) for p in PHOTOS]
        theirs = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
        assert_pillows(name, ours, theirs)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_method_steps_on_the_gpu_without_waiting(tiny, method):
    config = tiny(method, device="cuda", net="small(width=4)", ema=0.9, compile=False)
    run = make_training(config, build_parts(config))
    batches = [run.parts.batches[k] for k in range(4)]
    run.advance(batches[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[1:]:
            run.advance(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(value).all() for value in run.tensors().values())


@pytest.mark.parametrize(
    ("method", "compile"), [*((method, None) for method in ALL_METHODS), ("freematch", "net")]
)
def test_the_captured_step_equals_the_eager_one(tiny, method, compile):
    """Twenty steps in float64 from the same seed, over chunk borders, compiled and captured."""
    settings = {"steps": 20, "ema": 0.9, "chunk": 8, "compile": compile}
    config = tiny(method, device="cuda", precision="fp64", **settings)
    torch._dynamo.reset()
    eager = make_training(config.replace(compile=False), build_parts(config))
    replayed = make_training(config, build_parts(config))
    engine = CapturedStep([replayed])
    while eager.step < 20:
        eager.advance()
        engine.advance()
    assert not engine.failed
    first, second = eager.tensors(), replayed.tensors()
    extra = {name for name in second if name not in first}  # weights without a gradient: idle
    assert all(name.startswith("optimizer/") for name in extra)
    assert first.keys() == second.keys() - extra
    close = 1e-4 if method == "vat" else 1e-8
    for name in first:
        torch.testing.assert_close(second[name], first[name], atol=close, rtol=close, msg=name)


def test_dropout_under_replay_is_new_each_step_and_resumable(tiny):
    config = tiny("fixmatch", device="cuda", net="vit_tiny_patch2_32", steps=12, compile=False)
    # SGD: Adam would blow up the rounding noise of gradients that are zero, such as the keys' bias
    config = config.replace(dataset="synthetic(size=16)", optimizer="sgd")
    runs = []
    for start in (0, 5):
        run = make_training(config, build_parts(config))
        if start:
            run.restore(runs[0][1], {"step": 5, "sums": 0, "best": None, "best_step": None})
        engine = CapturedStep([run])
        state = None
        while run.step < 12:
            if run.step == 5:
                state = {k: v.clone() for k, v in run.tensors().items() if not k.startswith("sums")}
            engine.advance()
        runs.append((run.tensors(), state))
    for name, value in runs[0][0].items():
        if not name.startswith("sums"):
            torch.testing.assert_close(runs[1][0][name], value, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_on_the_gpu_learns_and_continues(tiny, tmp_path, precision):
    config = tiny("freematch", device="cuda", net="small(width=8)", steps=60, precision=precision)
    run = train(config, tmp_path / "run", quiet=True)
    assert run.result.metrics["error"].value < 0.2


def test_streamed_pictures_on_the_gpu_are_the_resident_ones(tiny):
    config = tiny(device="cuda", chunk=3)
    resident = build_parts(config.replace(source="resident")).batches
    streamed = build_parts(config.replace(source="stream")).batches
    for step in (0, 1, 5, 2):
        assert torch.equal(resident[step].u[1], streamed[step].u[1])


def test_the_pipeline_runs_on_the_gpu():
    images = BATCH.cuda()
    transform = augment.pipeline("crop(4)|flip|randaugment(3)|cutout(0.5)")
    out = transform(images, torch.Generator("cuda").manual_seed(0))
    assert out.shape == images.shape
    assert out.device.type == "cuda"


def weights(run):
    return {k: v for k, v in run.tensors().items() if k.startswith(("net/", "ema/", "method/"))}


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_runs_captured_together_equal_runs_captured_alone(tiny, optimizer, clip):
    """Dropout included: each run draws its own numbers, whoever else is on the GPU."""
    config = tiny(
        "freematch",
        device="cuda",
        precision="fp64",
        net="vit_tiny_patch2_32",
        dataset="synthetic(size=16)",
        steps=10,
        chunk=4,
        ema=0.9,
        optimizer=optimizer,
        clip=clip,
        lr=1e-3,
    )
    both = [make_training(c, build_parts(c)) for c in (config, config.replace(seed=1))]
    engine = CapturedStep(both)
    for _ in range(10):
        engine.advance()
    assert not engine.failed
    for seed, run in enumerate(both):
        alone = make_training(config, build_parts(config.replace(seed=seed)))
        alone.config = config.replace(seed=seed)
        single = CapturedStep([alone])
        for _ in range(10):
            single.advance()
        for name, value in weights(alone).items():
            torch.testing.assert_close(weights(run)[name], value, atol=1e-8, rtol=1e-6, msg=name)


# Rounding grows step by step: after 20 steps of Adam at lr 1e-3 a weight has moved by about 0.02.
# fp32 must agree to 2 % of that, bf16, which keeps 8 bits of every product, to about that in the
# mean over weights (Adam moves a weight by its full rate even where the gradient is noise).
@pytest.mark.parametrize(("precision", "mean"), [("fp32", 4e-4), ("bf16", 4e-3)])
def test_the_captured_step_follows_the_eager_one_in_low_precision(tiny, precision, mean):
    config = tiny("freematch", device="cuda", precision=precision, steps=20, lr=1e-3, ema=0.9)
    config = config.replace(net="vit_tiny_patch2_32(drop_path=0.0)", dataset="synthetic(size=16)")
    torch._dynamo.reset()
    eager = make_training(config.replace(compile=False), build_parts(config))
    replayed = make_training(config, build_parts(config))
    engine = CapturedStep([replayed])
    for _ in range(20):
        eager.advance()
        engine.advance()
    assert not engine.failed
    first, second = weights(eager), weights(replayed)
    far = [(first[k].float() - second[k].float()).abs().flatten() for k in first if "net/" in k]
    assert torch.cat(far).mean() < mean


def test_nothing_waits_for_the_device_between_log_lines(tiny):
    config = tiny("freematch", device="cuda", compile=False, steps=40, chunk=4)
    run = make_training(config, build_parts(config))
    engine = CapturedStep([run])
    for _ in range(6):
        engine.advance()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(12):  # over three borders of chunks: feeding included
            engine.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.sums.read()["loss"] > 0


class Uncapturable(FixMatch):
    """Asks the host in the middle of a step."""

    def forward(self, net, ema, batch):
        plan = super().forward(net, ema, batch)
        return plan if batch.y.sum() > -1 else plan._replace(unlabelled=None)


def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_so(tiny, capsys):
    config = tiny(f"{__name__}.Uncapturable", device="cuda", steps=6)
    eager = make_training(config.replace(compile=False), build_parts(config))
    run = make_training(config, build_parts(config))
    engine = CapturedStep([run])
    for _ in range(6):
        eager.advance()
        engine.advance()
    assert engine.failed
    assert "cannot be captured" in capsys.readouterr().err.replace("\n", " ")
    for name, value in weights(eager).items():
        torch.testing.assert_close(weights(run)[name], value, atol=1e-4, rtol=1e-3, msg=name)


def test_compiled_evaluation_measures_what_the_exact_one_does(tiny):
    config = tiny("fixmatch", device="cuda", net="small(width=8)", steps=40, eval_every=1)
    parts = build_parts(config)
    pictures, _ = parts.sets["test"]
    exact = Predictor(parts, 37)(pictures)
    fast = make_training(config.replace(eval_batch=37), parts).predict
    assert fast.compiled
    torch.testing.assert_close(fast(pictures), exact, atol=1e-4, rtol=1e-4)


DETERMINISTIC = [
    ("vit_tiny_patch2_32", "bf16", "auto"),
    ("vit_tiny_patch2_32", "fp32", "auto"),
    ("vit_tiny_patch2_32", "fp32", "eager"),
    ("wrn_28_2", "bf16", "auto"),
]


@pytest.mark.parametrize(("net", "precision", "engine"), DETERMINISTIC)
def test_a_deterministic_run_has_the_same_bytes_twice(tiny, tmp_path, net, precision, engine):
    config = tiny(
        "freematch",
        device="cuda",
        deterministic=True,
        net=net,
        dataset="synthetic(size=16)",
        precision=precision,
        engine=engine,
        compile=None if engine == "auto" else False,
        strong="crop(2)|randaugment(3)|cutout(0.5)",
        penalty="margin(m=1)",
        steps=30,
        ema=0.9,
    )
    files = []
    for name in ("one", "two"):
        torch._dynamo.reset()  # the second compiles for itself
        folder = train(config, tmp_path / name, quiet=True).folder
        names = ("metrics.jsonl", "predictions.npz", "model.safetensors")
        files.append([(folder / file).read_bytes() for file in names])
        assert '"deterministic": true' in (folder / "environment.json").read_text()
    assert files[0] == files[1]


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_method_has_deterministic_operations_only(tiny, method):
    config = tiny(method, device="cuda", net="vit_tiny_patch2_32", dataset="synthetic(size=16)")
    ends = []
    with deterministic(True):
        for _ in range(2):
            run = new_training(config.replace(compile=False))
            for _ in range(3):
                run.advance()
            ends.append(run.tensors())
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value), name


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_captured_run_notices_a_bad_step_and_goes_back(tiny, tmp_path, kind):
    config = tiny(f"test_nonfinite.Poisoned(kind='{kind}', at=13)", device="cuda", steps=20)
    with pytest.raises(ValueError, match="became infinite or NaN in step 13, after 3 rollbacks"):
        train(config.replace(on_nan="rollback"), tmp_path / "run", quiet=True)
    tensors, note, facts = checkpoint.read_fault(tmp_path / "run" / "fault")
    assert (note["step"], facts["step"]) == (13, 13)
    assert all(value.isfinite().all() for value in tensors.values())


def test_a_captured_rollback_learns_more_slowly_and_ends_well(tiny, tmp_path):
    run = train(steep(tiny, device="cuda", steps=20, checkpoint_every=10), tmp_path, quiet=True)
    back = run.lines("rollback")
    assert 1 <= len(back) <= checkpoint.MOST_ROLLBACKS
    assert run.lines()[-1]["lr"] == pytest.approx(LR * back[-1]["rate"])


def test_a_whole_network_of_few_labels_is_evaluated_by_fold_models_together(tmp_path, monkeypatch):
    monkeypatch.setenv("CALMATCH_CACHE", str(tmp_path / "cache"))
    root = blobs(tmp_path / "pics", each=4, spare=60)
    (root / "kind 0" / "0-3.png").unlink()  # folds of different sizes
    options = FitOptions(root, net="tiny", steps=60, size=16, device="cuda")
    said: list[str] = []
    monkeypatch.setattr(console, "message", lambda line, *_: said.append(line))
    run = fit(dataclasses.replace(options, out=tmp_path / "run", quiet=True))
    assert not [line for line in said if "captured" in line]  # none fell back to eager steps
    assert run.result.evaluated_on == "crossfit"
    assert run.result.images["labelled"] == run.result.images["test"] == 11
    assert sorted(path.name for path in (run.folder / "work" / "all-pictures").iterdir()) == [
        "all",
        "fold1",
        "fold2",
        "fold3",
        "fold4",
    ]
