"""Beyond the paper: thresholds that know the margin, margins by rule, mixup, label-free heat."""

import dataclasses
import json

import pytest
import torch
from test_methods import _compare_compiled

from calmatch import losses
from calmatch.core import Term
from calmatch.runs import find_finished
from calmatch.training.config import Config, check_config
from calmatch.training.setup import build_parts


def threshold(tiny, method, **changes):
    return build_parts(tiny(method, **changes)).method.threshold


@pytest.mark.parametrize("method", ["fixmatch", "uda", "flexmatch", "refixmatch", "simmatch"])
def test_a_capped_threshold_is_the_confidence_at_a_share_of_the_margin(tiny, method):
    low = {"penalty": "margin(m=3)", "cap_threshold": 0.5}
    assert threshold(tiny, method, **low) == pytest.approx(losses.ceiling(1.5, 4))
    cap = {"penalty": "margin(cap=0.9)", "cap_threshold": 1.0}
    usual = threshold(tiny, method)
    assert threshold(tiny, method, **cap) == pytest.approx(min(usual, 0.9))
    assert threshold(tiny, method, penalty="margin(m=3)") == usual  # off by default
    assert (
        threshold(tiny, method, penalty="margin(m=30)", cap_threshold=0.5) == usual
    )  # never raised
    assert threshold(tiny, method, penalty="entropy", cap_threshold=0.5) == usual


def test_a_capped_threshold_keeps_fixmatch_fed_and_ends_the_warning(tiny):
    starved = build_parts(tiny("fixmatch", penalty="margin(m=2)"))
    fed = build_parts(tiny("fixmatch", penalty="margin(m=2)", cap_threshold=0.7))
    assert any("runs out" in note or "run out" in note for note in starved.notes)
    assert not any("run out" in note for note in fed.notes)
    capped = torch.tensor([[0.70, 0.10, 0.10, 0.10]])  # the most that this margin allows
    assert float(capped.amax()) <= losses.ceiling(2, 4)
    assert starved.method.select(capped, None)[0].item() == 0
    assert fed.method.select(capped, None)[0].item() == 1
    with pytest.raises(ValueError, match="cap_threshold must lie between 0 and 1"):
        check_config(tiny("fixmatch", cap_threshold=1.5))


def test_a_margin_by_labels_claims_what_they_can_show(tiny):
    loss = losses.build("margin(m='labels')", 10, 40)
    assert losses.margins(loss, 10) == [pytest.approx(losses.cap_margin(41 / 42, 10))]
    parts = build_parts(tiny("freematch", penalty="margin(m='labels')"))
    assert losses.margins(parts.unlabelled_loss, 4) == [losses.labels_margin(16, 4)]
    with pytest.raises(ValueError, match="number of labels"):
        losses.build("margin(m='labels')")
    with pytest.raises(ValueError, match="'labels'"):
        losses.build("margin(m='test')", 10, 40)


def test_a_gated_margin_acts_only_while_confidence_exceeds_agreement():
    logits = torch.tensor([[6.0, 0.0, 0.0]] * 4, requires_grad=True)  # confidence 0.995
    right, wrong = torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1])
    ones = torch.ones(4)
    gated = {"m": 1.0, "gate": True}
    assert losses.margin(Term(logits, right, ones), **gated).item() == 0
    over = Term(logits, wrong, ones)
    assert losses.margin(over, **gated).item() == losses.margin(over, m=1.0).item() > 0
    left_out = Term(logits, wrong, torch.tensor([1.0, 1.0, 1.0, 0.0]))  # only trusted rows count
    assert losses.margin(left_out, **gated).item() == 0


@pytest.mark.parametrize("hard", [True, False])
def test_mixup_mixes_pictures_and_targets_by_the_same_share(tiny, hard):
    parts = build_parts(tiny(f"fixmatch(mixup=0.5, hard={hard}, threshold=0.3)"))
    plain = build_parts(tiny(f"fixmatch(hard={hard}, threshold=0.3)"))
    batch = parts.batches[0]
    assert plain.batches[0].draws == {}
    beta = batch.draws["beta"]
    share, partner = max(beta, 1 - beta), batch.draws["u_key"].argsort()
    pictures = batch.u[1] * share + batch.u[1][partner] * (1 - share)
    torch.testing.assert_close(parts.method.mixed(batch.u[1], batch.u[1], batch), pictures)
    parts.net.eval(), plain.net.eval()  # a mixed batch has other BatchNorm statistics
    mixed = parts.method(parts.net, parts.net, batch).unlabelled
    alone = plain.method(plain.net, plain.net, batch).unlabelled
    p = parts.net(batch.u[0]).logits.softmax(-1)
    own = torch.nn.functional.one_hot(alone.target, 4).float() if hard else alone.target
    torch.testing.assert_close(mixed.target, share * own + (1 - share) * p[partner])
    torch.testing.assert_close(mixed.weight, alone.weight)
    torch.testing.assert_close(mixed.logits, parts.net(pictures).logits)


@pytest.mark.parametrize("method", ["freematch", pytest.param("flexmatch", marks=pytest.mark.slow)])
def test_mixup_and_gate_compile_into_one_graph(tiny, method):
    settings = {"precision": "fp64", "penalty": "margin(m=1, gate=True)"}
    _compare_compiled(tiny(f"{method}(mixup=0.5, hard=False)", **settings), "eager", 1e-12)


def test_a_field_that_older_runs_have_is_left_out(tiny):
    config = tiny("fixmatch")
    assert Config().replace(**config.dump(), keep_views=True) == config


def test_a_run_made_before_a_field_existed_is_still_the_same_run(tiny, tmp_path):
    config = tiny("fixmatch")
    folder = tmp_path / "run"
    folder.mkdir()
    old = {k: v for k, v in dataclasses.asdict(config).items() if k != "cap_threshold"}
    (folder / "config.json").write_text(json.dumps(old))
    assert find_finished(folder, config) is None
    with pytest.raises(ValueError, match=r"cap_threshold=0\.0, not 0\.5"):
        find_finished(folder, config.replace(cap_threshold=0.5))
