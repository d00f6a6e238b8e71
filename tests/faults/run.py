"""Many hits: `python tests/faults/run.py --hits 500`; a table of kinds, hits and survivors."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import hits
from forks import Forks

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from record import put

WEIGHTS = {"bench": 0.1, "files": 3, "fit": 0.6}  # a suite starts real Pythons: dear


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hits", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--case", choices=list(hits.CASES))
    parser.add_argument("--kind", choices=list(hits.HITS))
    parser.add_argument("--record", type=Path, help="a page with a place for the table")
    parser.add_argument("--keep", type=Path, help="where counts are kept: the same line goes on")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    options = parser.parse_args()
    kept = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    options.seed = kept.get("seed", options.seed)
    done: Counter[str] = Counter(kept.get("done", {}))
    survived: Counter[str] = Counter(kept.get("survived", {}))
    failed: list[str] = kept.get("failed", [])
    number, began = kept.get("stories", 0), time.monotonic()
    chance = random.Random(f"{options.seed} {number}")
    forks = Forks()
    work = Path(tempfile.mkdtemp(prefix="calmatch-faults-"))
    stage = hits.Stage(work, options.seed, forks)
    names = [options.case] if options.case else list(hits.CASES)
    weights = [WEIGHTS.get(name, 6) for name in names]
    print(f"seed {options.seed}, in {work}, small disk: {stage.mounted}", flush=True)
    while sum(done.values()) < options.hits:
        if time.monotonic() - began > options.minutes * 60:
            break
        number += 1
        case = hits.CASES[chance.choices(names, weights)[0]]
        able = [options.kind] if options.kind else hits.kinds(case)
        wanted = [chance.choice(able) for _ in range(2 if case.name == "bench" else 8)]
        seed = chance.randrange(1 << 30)
        stage.chance = random.Random(seed)
        landed: list[str] = []
        try:
            for kind, in_time in hits.story(stage, case, wanted, f"story-{number}"):
                landed += [kind] if in_time else []
        except Exception as error:
            aside = work / f"failed-{number}"
            if (place := work / "disk" / f"story-{number}").exists():
                shutil.move(place, aside)
            failed.append(f"story {number} seed {seed} {case.name} {wanted}: {error!r} in {aside}")
            traceback.print_exc()
            print(failed[-1], flush=True)
            done.update([*landed, wanted[min(len(landed), len(wanted) - 1)]])
            survived.update(landed)
        else:
            done.update(landed)
            survived.update(landed)
        for output in work.glob("output-*.txt") if not failed else ():
            output.unlink()
        if options.keep:
            facts = {"seed": options.seed, "stories": number, "failed": failed}
            facts |= {"done": dict(done), "survived": dict(survived)}
            options.keep.write_text(json.dumps(facts))
        print(
            f"{time.monotonic() - began:5.0f} s  {sum(done.values())} hits, "
            f"{sum(survived.values())} survived; story {number}: {case.name}, "
            f"{len(landed)} of {len(wanted)} in time",
            flush=True,
        )
    stage.close()
    table = f"| kind | hits | survived |\n|---|---|---|\n{_rows(done, survived)}"
    print(f"\n{table}")
    if options.record:
        how = f"`make faults HITS={options.hits} SEED={options.seed}`"
        put(options.record, "hits", table, how)
    if failed:
        print("\n".join(failed))
        return 1
    shutil.rmtree(work)
    return 0


def _rows(done: Counter[str], survived: Counter[str]) -> str:
    lines = [
        f"| {kind}: {(hits.HITS[kind].__doc__ or '').splitlines()[0]} | {n} | {survived[kind]} |"
        for kind in hits.HITS
        if (n := done[kind])
    ]
    return "\n".join([*lines, f"| all | {sum(done.values())} | {sum(survived.values())} |"])


if __name__ == "__main__":
    raise SystemExit(main())
