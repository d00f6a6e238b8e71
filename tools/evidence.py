"""From run folders to results/*.jsonl, and from these alone to docs/results.md.

`python tools/evidence.py collect RUNS ... --out results/NAME.jsonl [--suite SUITE]` makes a line of
every finished run (no weights, no predictions); where the file is there, its other lines stay.
`python tools/evidence.py write` rewrites docs/results.md and its figures from results/*.jsonl.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from calmatch import checkpoint
from calmatch.bench import comparisons, evidence, figures, published, render, tables
from calmatch.bench.groups import Found

ROOT = Path(__file__).parent.parent
SUITES = ("eurosat", "cifar10", "beyond", "digits")  # the order of the page
INTRO = """# Results

Made by `python tools/evidence.py write` from `results/*.jsonl` alone; every line there is a run:
its settings, seed, numbers, learning curve, device and time. `calmatch train` with those settings
repeats it.

Weights are those of the last step, never chosen on test pictures: averaged ones (EMA) where a run
has them, and under "last weights" the plain ones of the same runs. Numbers of other papers were
chosen on the test set and made with another network.
"""


def collect(runs: list[Path], out: Path, suite: str | None) -> None:
    """Add the runs to a file of lines, in place of older lines of the same settings and seed."""
    made = evidence.collect(runs, suite)
    before = out.read_text("utf-8").splitlines() if out.exists() else []
    lines = {_name(line): line for line in [*map(json.loads, before), *made]}
    out.parent.mkdir(parents=True, exist_ok=True)
    ordered = [lines[name] for name in sorted(lines)]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in ordered)
    checkpoint.write(out, text)
    print(f"{out}: {len(made)} runs added or renewed, {len(lines)} in all, {len(text):,} bytes")


def _name(line: dict[str, dict[str, int]]) -> tuple[str, int, int]:
    seeds = [line["config"].get(field, 0) for field in ("seed", "split_seed")]
    return str(line["code"]), seeds[0], seeds[1]


def write(files: list[Path], page: Path) -> None:
    """The page and its figures."""
    assets = page.parent / "assets" / "results"
    parts = [INTRO]
    for suite in SUITES:
        try:
            found = evidence.read(files, suite)
        except ValueError:
            continue  # none of its runs is there
        parts.append(section(suite, found, assets))
    checkpoint.write(page, "\n".join(parts))
    print(f"{page}: {len(parts) - 1} suites")


def section(suite: str, found: Found, assets: Path) -> str:
    """Everything about one suite."""
    renamed = evidence.as_published(found)
    known = any(published.find(g.row, g.column, "error", "") for g in renamed.groups)
    last = evidence.unaveraged(found)
    made = [evidence.free(found), evidence.more(found), evidence.agreements(found)]
    parts = [f"## {suite}\n", render.markdown([*tables.build(found, suite=suite), *made])]
    if last.groups:
        parts.append(render.markdown([evidence.averaging(found)]))
        parts.append(f"### {suite}: last weights\n")
        parts.append(render.markdown(tables.build(last, suite=suite)).replace("### ", "#### "))
    if known:
        parts.append(render.markdown(comparisons.beside(renamed, "")))
    parts.append(render.markdown([evidence.cost(found)]))
    parts += [curves(suite, found.only(column), assets) for column in found.columns]
    return "\n".join(parts)


def curves(suite: str, found: Found, assets: Path) -> str:
    """Learning curves of a column, as a figure."""
    name = f"{suite}_{found.columns[0]}.svg"
    drawing = figures.FIGURES["convergence"].prepare(found)
    assets.mkdir(parents=True, exist_ok=True)
    checkpoint.write(assets / name, figures.encode(figures.drawn("convergence", drawing), ".svg"))
    return f"![Learning curves on {found.columns[0]}](assets/results/{name})\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("runs", nargs="+", type=Path)
    collecting.add_argument("--out", type=Path, required=True)
    collecting.add_argument("--suite")
    writing = commands.add_parser("write")
    writing.add_argument("files", nargs="*", type=Path)
    writing.add_argument("--page", type=Path, default=ROOT / "docs" / "results.md")
    given = parser.parse_args()
    if given.command == "collect":
        collect(given.runs, given.out, given.suite)
    else:
        write(given.files or sorted((ROOT / "results").glob("*.jsonl")), given.page)


if __name__ == "__main__":
    main()
