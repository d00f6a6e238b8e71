"""`calmatch demo`: a network that is surer than it is right, and the margin that mends it."""

from collections.abc import Mapping, Sequence

import torch

from calmatch.bench import Failed, engine, stats
from calmatch.bench.engine import Job, SuiteProgress
from calmatch.console import Stopped, catch_signals, message
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
    seeds = range(options.seed, options.seed + options.pairs)
    words = (
        f"{2 * len(seeds)} runs of FreeMatch on scikit-learn's digits made hard (noise, 2 labels "
    )
    words += f"a class):\n{len(seeds)} label splits, each learned from without and with the margin."
    message(words, options.quiet)
    jobs = {}
    for row, penalty in PENALTIES.items():
        for seed in seeds:
            config = digits_hard("freematch", penalty=penalty, seed=seed, split_seed=seed)
            folder = options.out / row.replace(" + ", "-") / f"seed{seed}"
            jobs[row, seed] = Job(f"{row}, split {seed}", config.replace(device="cpu"), folder)
    _train(list(jobs.values()), len(seeds), options.quiet)
    runs = {row: [load_run(jobs[row, seed].folder) for seed in seeds] for row in PENALTIES}
    figure = save_figure(reliability_figure(_pool(runs)), options.out / "reliability.png")
    page = build([several[0] for several in runs.values()], options.out / "report.html")
    print("\n".join(describe(runs)[:-1]))
    print(f"\nPicture: {figure}\nReport:  {page} (of the first split)\n\n{describe(runs)[-1]}")


def _train(jobs: Sequence[Job], together: int, quiet: bool) -> None:
    """One process a core at most, and the seeds of a row in one process."""
    workers = [worker._replace(together=together) for worker in engine.local_workers(2)[:2]]
    waiting = [job for job in jobs if engine.job_state(job) != "finished"]
    with (
        catch_signals(collect=True) as signals,
        SuiteProgress("demo", waiting, quiet) as progress,
    ):
        engine.run_locally(waiting, progress, workers, signals)
    if signals:
        raise Stopped(signals[0])
    if failed := [item for item in progress.items.values() if item.state == "failed"]:
        raise Failed(f"{failed[0].job.name} {failed[0].note}; its log is in {failed[0].job.folder}")


def _pool(runs: Mapping[str, Sequence[Run]]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """All splits' predictions of a row together."""
    pairs = {row: [run.predictions() for run in several] for row, several in runs.items()}
    return {
        row: (torch.cat([p for p, _ in each]), torch.cat([y for _, y in each]))
        for row, each in pairs.items()
    }


def describe(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """The table's lines, and a last one that says in a sentence what it shows."""
    numbers = {row: [_measure(run) for run in several] for row, several in runs.items()}
    lines = [f"\n{'mean over splits, %':<22}{'right':>8}{'sure':>8}{'error':>8}{'ECE':>8}"]
    means = {}
    for row, several in numbers.items():
        means[row] = [stats.mean(values).value for values in zip(*several, strict=True)]
        lines.append(f"{row:<22}" + "".join(f"{value:>8.1f}" for value in means[row]))
    plain, mended = numbers.values()
    pairs = [[b - a for a, b in zip(*two, strict=True)] for two in zip(plain, mended, strict=True)]
    error, ece = (stats.paired([pair[k] for pair in pairs]) for k in (2, 3))
    lines.append("\nWith the margin less without, split by split (percentage points):")
    for name, test in (("error", error), ("ECE", ece)):
        interval = f"95 % interval {test.low:+.1f} to {test.high:+.1f}"
        lines.append(f"  {name:<6}{test.value:+6.1f}   {interval}, lower in {test.better} of")
        lines[-1] += f" {test.number} splits"
    (right, sure, *_), (right_after, sure_after, *_) = means.values()
    story = f"FreeMatch alone was {sure:.0f} % sure and {right:.0f} % right; with the margin it was"
    story += f" {sure_after:.0f} % sure and {right_after:.0f} % right: "
    if ece.high < 0:
        return [*lines, f"{story}its confidence can be believed more."]
    return [*lines, f"{story}these few splits do not show that the margin helps."]


def _measure(run: Run) -> tuple[float, float, float, float]:
    """Percentages: right answers, mean confidence, error, ECE."""
    sure = float(probabilities(run.predictions()[0]).amax(-1).mean())
    error, ece = (run.result.metrics[name].value for name in ("error", "ece"))
    return 100 - 100 * error, 100 * sure, 100 * error, 100 * ece
