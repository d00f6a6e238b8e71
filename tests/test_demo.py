"""The demo's story: told by its numbers, and the same with other seeds."""

import re

import pytest

import fabricated
from calmatch.demo import describe
from calmatch.runs import load_run
from calmatch.training.recipes import digits_hard


def make_runs(folder, change):
    """Five label splits without and with something that changes ECE by so much."""
    runs = {"freematch": [], "freematch + margin": []}
    for number, (row, several) in enumerate(runs.items()):
        for seed in range(5):
            config = digits_hard("freematch", seed=seed, split_seed=seed)
            ece = 0.2 + 0.01 * seed + number * change * (1 + 0.1 * seed)
            place = fabricated.run(folder / f"{row} {seed}", config, error=0.3, ece=ece)
            fabricated.history(place, seed=seed)
            several.append(load_run(place))
    return runs


@pytest.mark.parametrize(
    ("change", "end"),
    [(-0.1, "can be believed more."), (0.02, "do not show that the margin helps.")],
)
def test_the_last_line_is_a_sentence_that_follows_from_the_numbers(tmp_path, change, end):
    *table, last = describe(make_runs(tmp_path, change))
    assert last.endswith(end)
    assert "% sure and 70 % right" in last
    text = "\n".join(table)
    assert re.search(rf"ECE +{re.escape(f'{120 * change:+.1f}')} ", text)
    assert "95 % interval" in text
    assert f"lower in {5 if change < 0 else 0} of 5 splits" in text


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 10, 15])
def test_other_seeds_tell_the_same_story(typed, tmp_path, seed):
    done = typed("demo", "--quiet", "--seed", seed, "--out", tmp_path / "demo")
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.endswith("its confidence can be believed more.")
    assert (tmp_path / "demo" / "reliability.png").read_bytes().startswith(b"\x89PNG")
