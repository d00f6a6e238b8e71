"""`calmatch demo`: a network that is surer than it is right, and the margin that mends it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from calmatch.bench import engine, stats
from calmatch.bench.engine import Job, SuiteProgress
from calmatch.console import Failed, Stopped, catch_signals, message
from calmatch.options import DemoOptions
from calmatch.report import build
from calmatch.report.charts import reliability_figure, save_figure
from calmatch.runs import Run, load_run, probabilities
from calmatch.training.recipes import digits_hard

# FreeMatch, because its threshold follows its confidence, and the paper's margin for it where
# there are ten classes and few labels (STL-10 with 40)
PENALTIES = {"freematch": "", "freematch + margin": "margin(m=4)"}


def demo(options: DemoOptions) -> None:
    """The same label splits with and without the margin: a table, a picture, a sentence."""
    if options.pairs < 1 or options.seed < 0:
        raise ValueError("--pairs must be at least 1 and --seed at least 0.")
    seeds = range(options.seed, options.seed + options.pairs)
    runs_of = f"{2 * len(seeds)} runs of FreeMatch on scikit-learn's digits made hard"
    splits = f"{len(seeds)} label splits, each learned from without and with the margin."
    message(f"{runs_of} (noise, 2 labels a class):\n{splits}", options.quiet)
    jobs: dict[str, list[Job]] = {row: [] for row in PENALTIES}
    for row, penalty in PENALTIES.items():
        for seed in seeds:
            config = digits_hard("freematch", penalty=penalty, seed=seed, split_seed=seed)
            folder = options.out / row.replace(" + ", "-") / f"seed{seed}"
            jobs[row].append(Job(f"{row} {seed}", config.replace(device="cpu"), folder))
    _train([job for several in jobs.values() for job in several], len(seeds), options.quiet)
    runs = {row: [load_run(job.folder) for job in several] for row, several in jobs.items()}
    parts = {row: zip(*(r.predictions() for r in some), strict=True) for row, some in runs.items()}
    pooled: dict[str, Any] = {row: tuple(map(torch.cat, part)) for row, part in parts.items()}
    figure = save_figure(reliability_figure(pooled), options.out / "reliability.png")
    page = build([several[0] for several in runs.values()], options.out / "report.html")
    *lines, last = describe(runs)
    lines += ["", f"Picture: {figure}", f"Report:  {page} (of the first split)", "", last]
    print("\n".join(lines))


def _train(jobs: Sequence[Job], together: int, quiet: bool) -> None:
    """One process a core, two at most, and the seeds of a row in one process."""
    workers = [worker._replace(together=together) for worker in engine.local_workers(2)[:2]]
    waiting = [job for job in jobs if engine.job_state(job) != "finished"]
    with catch_signals(collect=True) as signals, SuiteProgress("demo", waiting, quiet) as progress:
        engine.run_locally(waiting, progress, workers, signals)
    if signals:
        raise Stopped(signals[0])
    if failed := [item for item in progress.items.values() if item.state == "failed"]:
        raise Failed(f"{failed[0].job.name} {failed[0].note}; its log is in {failed[0].job.folder}")


def describe(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """The table's lines, and a last one that says in a sentence what it shows."""
    plain, mended = (np.array([_measure(run) for run in several]) for several in runs.values())
    (right, sure, _), (right_after, sure_after, _) = means = plain.mean(0), mended.mean(0)
    lines = [f"\n{'mean over splits, %':<22}{'right':>8}{'sure':>8}{'ECE':>8}"]
    for row, numbers in zip(runs, means, strict=True):
        lines.append(f"{row:<22}" + "".join(f"{number:>8.1f}" for number in numbers))
    lines.append("\nWith the margin less without, split by split (percentage points):")
    change = mended - plain
    for name, differences in (("error", -change[:, 0]), ("ECE", change[:, 2])):
        test = stats.paired(differences.tolist())
        interval = f"95 % interval {test.low:+.1f} to {test.high:+.1f}"
        count = f"lower in {test.better} of {test.number} splits"
        lines.append(f"  {name:<6}{test.value:+6.1f}   {interval}, {count}")
    story = f"FreeMatch alone was {sure:.0f} % sure and {right:.0f} % right; with the margin it was"
    story += f" {sure_after:.0f} % sure and {right_after:.0f} % right: "
    shown = test.high < 0  # of ECE, the last one
    few = "these few splits do not show that the margin helps."
    return [*lines, story + ("its confidence can be believed more." if shown else few)]


def _measure(run: Run) -> tuple[float, float, float]:
    """Percentages: right answers, mean confidence, ECE."""
    sure = float(probabilities(run.predictions()[0]).amax(-1).mean())
    error, ece = (run.result.metrics[name].value for name in ("error", "ece"))
    return 100 - 100 * error, 100 * sure, 100 * ece
