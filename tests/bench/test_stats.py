import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from calmatch.bench import stats
from calmatch.bench.paper import PUBLISHED_TABLES

MAIN = PUBLISHED_TABLES["main"]
ROWS = list(dict.fromkeys(row for row, _, _ in MAIN))
COLUMNS = list(dict.fromkeys(column for _, column, _ in MAIN))
RECOMPUTED = {  # error, ECE, both: computed apart from this code
    "mixmatch": (9.83, 4.50, 7.17),
    "dash": (7.33, 7.17, 7.25),
    "adamatch": (4.17, 3.50, 3.83),
    "defixmatch": (8.33, 8.67, 8.50),
    "fixmatch": (6.50, 8.33, 7.42),
    "fixmatch + margin": (4.67, 5.50, 5.08),
    "flexmatch": (5.50, 6.83, 6.17),
    "flexmatch + margin": (2.50, 3.83, 3.17),
    "freematch": (3.83, 4.83, 4.33),
    "freematch + margin": (2.33, 1.83, 2.08),
}


@pytest.mark.parametrize(
    ("place", "metrics"), [(0, ["error"]), (1, ["ece"]), (2, ["error", "ece"])]
)
def test_published_numbers_give_the_known_friedman_ranks(place, metrics):
    scores = {row: [MAIN[row, c, m].value for m in metrics for c in COLUMNS] for row in ROWS}
    ranks = stats.friedman(scores)
    assert ranks.settings == 6 * len(metrics)
    for row, known in RECOMPUTED.items():
        assert ranks.rank[row] == pytest.approx(known[place], abs=0.005)


def test_the_paper_overclaims_its_ranks():
    """By Nemenyi's test FreeMatch with and without margin cannot be told apart."""
    scores = {r: [MAIN[r, c, m].value for m in ("error", "ece") for c in COLUMNS] for r in ROWS}
    ranks = stats.friedman(scores)
    assert ranks.rank["freematch"] - ranks.rank["freematch + margin"] < ranks.distance
    assert ranks.rank["fixmatch"] - ranks.rank["freematch + margin"] > ranks.distance


@pytest.mark.parametrize(
    ("rows", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (7, 2.949), (10, 3.164)]
)
def test_nemenyi_has_the_tabulated_quantiles(rows, q):
    settings = 14
    wanted = q * (rows * (rows + 1) / (6 * settings)) ** 0.5
    assert stats.nemenyi(rows, settings) == pytest.approx(wanted, rel=1e-3)


TABLE = st.integers(2, 6).flatmap(
    lambda rows: st.lists(
        st.lists(st.integers(0, 5), min_size=rows, max_size=rows), min_size=1, max_size=8
    )
)


@given(TABLE)
def test_ranks_always_share_out_the_same_total(columns):
    rows = len(columns[0])
    scores = {str(k): [column[k] for column in columns] for k in range(rows)}
    ranks = stats.friedman(scores)
    assert sum(ranks.rank.values()) == pytest.approx(rows * (rows + 1) / 2)
    assert ranks.p is None or 0 <= ranks.p <= 1
    turned = stats.friedman({k: [-v for v in values] for k, values in scores.items()})
    for row in scores:
        assert turned.rank[row] == pytest.approx(rows + 1 - ranks.rank[row])


def test_gaps_in_a_table_are_refused():
    with pytest.raises(ValueError, match="in every setting"):
        stats.friedman({"a": [1.0, float("nan")], "b": [1.0, 2.0]})
    with pytest.raises(ValueError, match="two rows"):
        stats.friedman({"a": [1.0, 2.0]})


def test_the_mean_says_which_deviation():
    mean = stats.mean([1.0, 2.0, 4.0])
    assert mean.sd == pytest.approx(np.std([1, 2, 4], ddof=1))
    assert stats.mean([3.0]) == stats.Mean(3.0, None, 1)


def test_paired_differences_find_a_shift_and_doubt_noise():
    random = np.random.default_rng(0)
    sure = stats.paired((random.normal(size=20) - 2).tolist())
    assert sure.high < 0
    assert sure.p < 0.001
    assert sure.low < sure.value < sure.high
    assert sure.p == pytest.approx(
        scipy_stats.wilcoxon(np.random.default_rng(0).normal(size=20) - 2).pvalue
    )
    noise = stats.paired(random.normal(size=20).tolist())
    assert noise.low < 0 < noise.high


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    random = np.random.default_rng(1)
    tests = [stats.paired(random.normal(size=20).tolist(), resamples=500) for _ in range(300)]
    covered = np.mean([item.low <= 0 <= item.high for item in tests])
    assert 0.88 < covered < 0.98


def test_three_pairs_cannot_convince_wilcoxon():
    test = stats.paired([-1.0, -2.0, -3.0])
    assert test.p == 0.25
    assert (test.better, test.worse, test.number) == (3, 0, 3)


def test_no_difference_has_no_p_and_ties_are_neither_better_nor_worse():
    test = stats.paired([0.0, 0.0])
    assert (test.p, test.better, test.worse, test.value) == (None, 0, 0, 0.0)
