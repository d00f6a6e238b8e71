"""Numbers that are not finite: noticed in time, traced to their step, kept, undone."""

from __future__ import annotations

import json
import math
import re
import signal

import pytest
import torch

from calmatch import console
from calmatch.methods.fixmatch import FixMatch
from calmatch.training import checkpoint
from calmatch.training.loop import train, train_together
from calmatch.training.setup import build_parts
from calmatch.training.step import Training, new_training


class Poisoned(FixMatch):
    """One step goes wrong: in its loss, in a gradient of a finite loss, or in a moment."""

    def __init__(self, task, *, kind: str = "loss", at: int = 13):
        super().__init__(task)
        self.kind, self.at = kind, at

    def forward(self, net, ema, batch):
        plan = super().forward(net, ema, batch)
        now = (batch.step == self.at).to(plan.labelled.logits.dtype)
        x = plan.labelled.logits.sum()
        poison = {
            "loss": now * (x * 0 + 1).div(1 - now),
            "gradient": ((x - x.detach()) * now + 1 - now).sqrt(),  # compilers drop x * 0
            "moment": now * x * 1e25,
        }[self.kind]
        return plan._replace(extra={"poison": poison})


class Steep(FixMatch):
    """Falls into a ditch so steep that a learning rate over some bound jumps out of it forever."""

    def forward(self, net, ema, batch):
        plan = super().forward(net, ema, batch)
        square = next(iter(net.parameters())).square().sum()
        return plan._replace(extra={"ditch": 50 * (batch.step > 10) * square * square})


def poisoned(tiny, kind, **changes):
    return tiny(f"{__name__}.Poisoned(kind='{kind}', at=13)", steps=20, **changes)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [("loss", "The loss became"), ("gradient", "A gradient became"), ("moment", "A weight or")],
)
def test_a_bad_step_is_found_within_a_log_interval_and_kept(tiny, tmp_path, kind, words, optimizer):
    if (kind, optimizer) == ("moment", "sgd"):
        return  # SGD squares nothing: such a gradient is only large
    config = poisoned(tiny, kind, log_every=5, checkpoint_every=4, optimizer=optimizer)
    with pytest.raises(ValueError, match=words) as caught:
        train(config, tmp_path / "run", quiet=True)
    assert "in step 13;" in str(caught.value)
    assert "--lr" in str(caught.value)
    tensors, note, facts = checkpoint.read_fault(tmp_path / "run" / "fault")
    assert (facts["step"], facts["noticed"], facts["checkpoint"]) == (13, 15, 12)
    assert note["step"] == 13
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 6, 10, 12]
    # the rows are those of the batch, and the state is the one of a run without the fault
    parts = build_parts(config)
    batch = parts.batches[13]
    assert facts["labelled"] == [parts.split.labelled[k] for k in batch.x_id.tolist()]
    assert facts["unlabelled"] == [parts.split.unlabelled[k] for k in batch.u_id.tolist()]
    healthy = new_training(config.replace(method=f"{__name__}.Poisoned(at=99)"))
    while healthy.step < 13:
        healthy.advance()
    for name, value in healthy.tensors().items():
        if not name.startswith("sums/"):
            assert torch.equal(tensors[name], value), name
    assert not list((tmp_path / "run").rglob("*.part"))


def test_the_part_that_broke_is_named(tiny, tmp_path):
    with pytest.raises(ValueError, match="gradient"):
        train(poisoned(tiny, "gradient"), tmp_path / "run", quiet=True)
    losses = checkpoint.read_fault(tmp_path / "run" / "fault")[2]["losses"]
    assert losses["poison"] == {
        "value": 0.0,
        "gradient": "nan",
        "broken": losses["poison"]["broken"],
    }
    assert losses["poison"]["broken"]
    assert math.isfinite(losses["labelled"]["gradient"])
    assert not losses["labelled"]["broken"]


@pytest.mark.parametrize("every", [1, 3])
def test_nothing_bad_reaches_a_checkpoint_or_an_evaluation(tiny, tmp_path, every):
    config = poisoned(tiny, "loss", log_every=20, eval_every=20, checkpoint_every=every)
    with pytest.raises(ValueError, match="in step 13;"):
        train(config, tmp_path / "run", quiet=True)
    paths = list((tmp_path / "run" / "checkpoint").glob("*.safetensors"))
    assert max(int(path.stem) for path in paths) == (13 if every == 1 else 12)
    for path in paths:
        assert all(value.isfinite().all() for value in checkpoint.read_checkpoint(path)[0].values())


def test_a_healthy_run_is_looked_at_only_when_the_host_looks_anyway(tiny, tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(checkpoint, "is_finite", lambda run: checked.append(run.step) or True)
    train(tiny(steps=12, checkpoint_every=9), tmp_path / "run", quiet=True)
    assert checked == [5, 6, 9, 10, 12]


LR = 0.0055


def steep(tiny, **changes):
    settings = {"optimizer": "sgd", "momentum": 0.0, "lr": LR, "schedule": "constant"}
    return tiny(f"{__name__}.Steep", on_nan="rollback", **{**settings, **changes})


def test_a_rollback_halves_the_rate_until_numbers_stay_finite(tiny, tmp_path):
    run = train(steep(tiny, steps=20, checkpoint_every=10), tmp_path / "run", quiet=True)
    back = run.lines("rollback")
    assert 1 <= len(back) <= checkpoint.MOST_ROLLBACKS
    assert [line["rate"] for line in back] == [0.5 ** (k + 1) for k in range(len(back))]
    assert run.lines()[-1]["lr"] == pytest.approx(LR * back[-1]["rate"])
    assert all(math.isfinite(line["loss"]) for line in run.lines())
    assert sum("learning rate was" in note for note in run.result.notes) == len(back)
    steps = [line["step"] for line in run.lines()]
    assert steps == sorted(set(steps))
    assert (run.folder / "fault" / "fault.json").is_file()


SAME = ("predictions.npz", "metrics.jsonl", "model.safetensors", "result.json")


@pytest.mark.parametrize("stop", ["kill", "signal"])
def test_a_run_that_went_back_and_was_stopped_anywhere_ends_the_same(
    tiny, tmp_path, monkeypatch, stop
):
    """Killed, or ended by a signal (which writes a checkpoint between), after every step."""
    config = steep(tiny, steps=20, checkpoint_every=10)
    train(config, tmp_path / "whole", quiet=True)
    original, left = Training.advance, [0]

    def stumbling(run, batch=None):
        original(run, batch)
        left[0] -= 1
        if left[0] == 0 and stop == "kill":
            raise KeyboardInterrupt
        if left[0] == 0:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Training, "advance", stumbling)
    for after in range(6, 40):  # enough to pass the next checkpoint, then later and later
        left[0] = after
        try:
            train(config, tmp_path / "cut", quiet=True)
            break
        except (KeyboardInterrupt, console.Stopped):
            continue
    for name in SAME:
        one, other = (tmp_path / kind / name for kind in ("whole", "cut"))
        assert one.read_bytes() == other.read_bytes(), name


def test_a_run_that_no_rate_helps_gives_up_after_a_few_rollbacks(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"in step 13, after 3 rollbacks.*--clip 1\.") as caught:
        train(poisoned(tiny, "gradient", on_nan="rollback"), tmp_path / "run", quiet=True)
    assert "--on-nan" not in str(caught.value)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    back = [line for line in map(json.loads, lines) if line["kind"] == "rollback"]
    assert [line["rate"] for line in back] == [0.5, 0.25, 0.125]


def test_a_fault_of_one_run_leaves_the_one_beside_it_as_if_alone(tiny, tmp_path):
    config = steep(tiny, steps=20, checkpoint_every=10, log_every=3)
    for seed in (3, 4):
        train(config.replace(seed=seed), tmp_path / f"alone/seed{seed}", quiet=True)
    train_together(
        [config.replace(seed=seed) for seed in (3, 4)],
        [tmp_path / f"both/seed{seed}" for seed in (3, 4)],
        quiet=True,
    )
    for seed in (3, 4):
        for name in SAME:
            one, other = (tmp_path / kind / f"seed{seed}" / name for kind in ("alone", "both"))
            assert one.read_bytes() == other.read_bytes(), (seed, name)


def test_a_run_stopped_by_a_fault_may_be_continued_with_rollbacks(tiny, tmp_path):
    config = steep(tiny, steps=20, checkpoint_every=10)
    with pytest.raises(ValueError, match="--on-nan rollback"):
        train(config.replace(on_nan="stop"), tmp_path / "run", quiet=True)
    run = train(config, tmp_path / "run", quiet=True)
    assert run.lines("rollback")


def test_numbers_that_a_replay_does_not_repeat_are_told_so(tiny, tmp_path, monkeypatch):
    config = tiny(steps=20, checkpoint_every=5)
    original, struck = checkpoint.is_finite, []

    def cosmic_ray(run):
        if run.step == 10 and not struck:
            struck.append(True)
            with torch.no_grad():
                next(run.parts.net.parameters())[0] = math.nan
        return original(run)

    monkeypatch.setattr(checkpoint, "is_finite", cosmic_ray)
    with pytest.raises(ValueError, match="between steps 5 and 10, not so when repeated"):
        train(config, tmp_path / "run", quiet=True)
    tensors, note, facts = checkpoint.read_fault(tmp_path / "run" / "fault")
    assert facts["step"] is None
    assert note["step"] == 5
    assert all(value.isfinite().all() for value in tensors.values())


def test_the_command_ends_with_one_sentence_and_exit_code_2(typed, tmp_path):
    words = "train digits_40 --dataset synthetic --labels 16 --net tiny --weak crop(1) --steps 30"
    ended = typed(*words.split(), "--lr", "1e30", "--out", tmp_path / "run", "--quiet")
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert str(tmp_path / "run" / "fault") in ended.stderr
    replayed = typed("replay", tmp_path / "run")
    assert replayed.returncode == 0, replayed.stderr
    assert "goes wrong here too" in replayed.stdout
    assert re.search(r"^labelled +\S+ +\S+", replayed.stdout, re.M)
    assert "Not finite after it: " in replayed.stdout
