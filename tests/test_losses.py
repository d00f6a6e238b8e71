import math

import pytest
import torch

from calmatch import losses
from calmatch.core import Term
from conftest import Golden

FILE = Golden("penalty")
EXEMPT = "soft_weights"  # partial weights count in proportion here; the reference drops them


def term(case):
    logits = FILE[f"{case}/logits_s"].requires_grad_()
    return Term(logits, FILE[f"{case}/label"], FILE[f"{case}/weight"])


@pytest.mark.parametrize("m", FILE.meta["margins"])
@pytest.mark.parametrize("where", FILE.meta["where"])
@pytest.mark.parametrize("case", [c for c in FILE.meta["cases"] if c != EXEMPT])
def test_margin_equals_the_reference_in_value_and_gradient(case, where, m):
    t = term(case)
    value = losses.margin(t, m=m, where=where)
    value.backward()
    assert value.item() == pytest.approx(float(FILE[f"{case}/{where}/m{m}/loss"]), abs=1e-9)
    torch.testing.assert_close(t.logits.grad, FILE[f"{case}/{where}/m{m}/grad"], atol=1e-9, rtol=0)


@pytest.mark.parametrize("key", [k for k in FILE.arrays if k.endswith("grad") and "/m" not in k])
def test_smoothing_and_focal_replace_cross_entropy_where_views_agree(key):
    case, kind, setting, _ = key.split("/")
    t = term(case)
    if kind == "smooth":
        value = losses.smoothing(t, alpha=float(setting))
    else:
        value = losses.focal(t, gamma=float(setting))
    value.backward()
    reference = FILE[f"{case}/{kind}/{setting}/value"]
    assert value.item() == pytest.approx(float(reference), abs=1e-9)
    torch.testing.assert_close(t.logits.grad, FILE[key], atol=1e-9, rtol=0)


def random_term(n=12, classes=5, soft=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 6 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    target = torch.randint(classes, (n,), generator=generator)
    if soft:
        target = torch.rand(n, classes, generator=generator, dtype=torch.float64).softmax(1)
    weight = torch.rand(n, generator=generator, dtype=torch.float64)
    return Term(logits, target, weight)


def test_partial_weights_count_in_proportion_in_the_margin():
    t = random_term()
    once = losses.margin(t, m=1, where="all")
    beyond = (t.logits.amax(1, keepdim=True) - t.logits - 1).relu().mean(1)
    assert float(once) == pytest.approx(float(0.1 * (t.weight * beyond).sum() / t.weight.sum()))
    double = losses.margin(t._replace(weight=2 * t.weight), m=1, where="all")
    assert float(double) == pytest.approx(float(once))


def test_margin_without_threshold_ignores_the_weights():
    t = random_term()
    nobody = t._replace(weight=torch.zeros_like(t.weight))
    assert float(losses.margin(nobody, m=1, where="all")) == 0
    free = losses.margin(nobody, m=1, where="all", accepted=False)
    assert float(free) == pytest.approx(
        float(losses.margin(t._replace(weight=torch.ones_like(t.weight)), m=1, where="all"))
    )


def test_the_cap_is_the_margin_written_as_confidence():
    t = random_term(classes=10)
    m = math.log(9 * 0.99 / 0.01)
    assert float(losses.margin(t, cap=0.99)) == pytest.approx(float(losses.margin(t, m=m)))
    assert losses.ceiling(losses.cap_margin(0.97, 100), 100) == pytest.approx(0.97)
    with pytest.raises(ValueError, match="cap"):
        losses.build("margin(cap=1.0)")


@pytest.mark.parametrize("name", losses.LOSSES)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_every_loss_is_finite_with_finite_gradients_even_at_the_edge(name, soft, weight):
    t = random_term(soft=soft)
    hard = t.logits.detach() * 200  # probabilities of exactly 0 and 1
    t = Term(hard.requires_grad_(), t.target, torch.full_like(t.weight, weight))
    value = losses.build(name)(t)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(t.logits.grad).all()
    if weight == 0:
        assert value.item() == 0


def test_soft_targets_of_one_class_equal_hard_targets():
    t = random_term()
    soft = t._replace(target=torch.nn.functional.one_hot(t.target, 5).double())
    for name in losses.LOSSES:
        loss = losses.build(name)
        assert float(loss(soft)) == pytest.approx(float(loss(t))), name


def test_soft_smoothing_and_focal_follow_their_definitions():
    t = random_term(soft=True)._replace(weight=torch.ones(12, dtype=torch.float64))
    logp = t.logits.log_softmax(1)
    smooth = -((0.8 * t.target + 0.2 / 5) * logp).sum(1).mean()
    focal = -(t.target * (1 - logp.exp()) ** 3 * logp).sum(1).mean()
    assert float(losses.smoothing(t, alpha=0.2, where="all")) == pytest.approx(float(smooth))
    assert float(losses.focal(t, gamma=3, where="all")) == pytest.approx(float(focal))


def test_mse_averages_over_classes_and_kl_is_zero_at_the_target():
    t = random_term(soft=True)
    p = t.logits.softmax(1)
    expected = (t.weight * (p - t.target).square().sum(1) / 5).mean()
    assert float(losses.mse(t)) == pytest.approx(float(expected))
    assert float(losses.kl(t._replace(target=p.detach()))) == pytest.approx(0, abs=1e-12)


def test_the_confidence_penalty_rewards_entropy():
    flat = Term(torch.zeros(4, 5), torch.zeros(4, dtype=torch.long), torch.ones(4))
    assert float(losses.entropy(flat, weight=0.5)) == pytest.approx(-0.5 * math.log(5))


def test_a_sum_is_the_sum_of_its_parts():
    t = random_term()
    both = losses.build("cross_entropy + margin(m=2) + margin(m=4, where='disagree')")
    assert list(both.parts) == ["cross_entropy", "margin", "margin#2"]
    assert float(both(t)) == pytest.approx(sum(float(part(t)) for part in both.parts.values()))
