"""What research/losses.py makes of its lines: paired differences, one model over sets, the rule."""

import numpy as np
import pytest

from research import trust


@pytest.fixture
def losses(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "trust", trust)
    from research import losses

    return losses


def lines(losses, better, on_the_last):
    """Ten sets, two splits: `freematch` has ECE 10, the present default 8, focal `better`."""
    names = [*(f"set{k}" for k in range(7)), *trust.LAST]
    for place, name in enumerate(names):
        for split in range(2):
            for row in losses.ROWS:
                ece = {"freematch": 0.1, "freematch + cap 0.98": 0.08}.get(row, 0.12)
                if row == "freematch + focal":
                    ece = on_the_last if name in trust.LAST else better
                ece += 0.001 * ((place + split) % 3)  # shared by all rows: pairs do not see it
                key = f"{name} 4 {split} {row}"
                line = {"key": key, "set": name, "labels": 4, "split": split, "row": row}
                yield {**line, "error": 0.3, "ece": ece, "sure": 0.8, "oracle": 0.02}


@pytest.mark.parametrize(
    ("better", "on_the_last", "verdict"),
    [
        (0.05, 0.06, "It replaces it."),
        (0.05, 0.09, "So the default stays."),  # the last three sets contradict
        (0.09, 0.01, "It is the default already."),
    ],
)
def test_the_default_changes_only_where_seven_sets_and_then_three_say_so(
    losses, better, on_the_last, verdict
):
    assert losses.choose([*lines(losses, better, on_the_last)])[-1] == verdict


def test_differences_are_paired_by_set_and_split(losses):
    own = losses.differences([*lines(losses, 0.05, 0.06)], ["freematch + focal"], "ece")
    assert own["set0"] == pytest.approx([-5, -5])
    assert own[trust.LAST[0]] == pytest.approx([-4, -4])


def test_the_interval_speaks_of_sets_like_these(losses):
    """Drawn from the model itself, it holds the mean in about 95 % of cases, at any spread."""
    chance = np.random.default_rng(0)
    for spread in (0.0, 2.0):
        held = 0
        for _ in range(200):
            means = -1 + spread * chance.standard_normal(10)
            by_set = {str(k): [*(m + chance.standard_normal(5))] for k, m in enumerate(means)}
            _, low, high = losses.hierarchical(by_set)
            held += low <= -1 <= high
        assert 180 <= held <= 200
