"""What one temperature would do to a test set: chosen with its labels, and without any."""

from __future__ import annotations

from torch import Tensor

from calmatch import evaluate, metrics, views


def with_labels(log_probs: Tensor, labels: Tensor) -> dict[str, dict[str, float]]:
    """ECE and NLL of the test set after temperature scaling.

    `crossfit`: each half scaled by the temperature of the other half's labels. `oracle`: by the
    temperature of the same labels, a bound that no honest temperature reaches in NLL.
    """
    from calmatch import posthoc

    ways = {"crossfit": posthoc.temperature_scaled, "oracle": posthoc.oracle_scaled}
    return {way: measured(scale(log_probs, labels), labels) for way, scale in ways.items()}


def without_labels(seen: views.Views, log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    """The test set scaled by what the agreement of unlabelled pictures' views says, and that."""
    from calmatch import posthoc

    pair = [seen.log_probs[name] for name in views.PAIR]
    scale = posthoc.agreement_temperature(*pair)
    return {
        **measured(scale(log_probs.double()), labels),
        "temperature": scale.values["temperature"],
        "agree": posthoc.agreement(*pair).agree,
    }


def measured(log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    """ECE and NLL, what a temperature changes."""
    probs = evaluate.probabilities(log_probs)
    found = metrics.summary(probs, labels, ("ece", "nll"), resamples=0)
    return {metric: item.value for metric, item in found.items()}
