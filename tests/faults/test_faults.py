"""Real processes hit at random moments; `make faults` does the same at least 500 times."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import hits
import pytest
from forks import Forks

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hits.Stage]:
    forks = Forks()
    made = hits.Stage(tmp_path_factory.mktemp("faults") / "work", 0, forks)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("freematch", "kill"),
        ("best of meanteacher", "term"),
        ("two seeds", "int"),
        ("freematch", "full"),
        ("freematch", "limit"),
        ("freematch", "readonly"),
        ("files", "vanish"),
        ("files", "kill"),
        ("freematch", "damage"),
        ("freematch", "double"),
        ("freematch", "clock"),
    ],
)
def test_a_run_that_was_hit_ends_with_the_bytes_of_one_that_was_not(stage, name, kind):
    if kind == "full" and not stage.mounted:
        pytest.skip("a full disk needs the right to mount one; the case `limit` stands in for it")
    seed = int(time.time() * 1000) % (1 << 30)
    stage.chance = random.Random(seed)
    landed = False
    for number in range(5):  # a process may end before its hit
        story = hits.story(stage, hits.CASES[name], [kind], f"{kind}-{name}-{number}")
        try:
            landed = sum(in_time for _, in_time in story) > 0
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        if landed:
            break
    assert landed, "five processes in a row ended before they could be hit"
