"""Run folders: what is written at the start and at the end of a run, and read back from it."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from calmatch import checkpoint, evaluate, examples, log, parallel, runfiles, scaled, spec, views
from calmatch import config as configs
from calmatch.augment import looks
from calmatch.config import Config
from calmatch.data.batches import stream_seed
from calmatch.environment import environment

if TYPE_CHECKING:
    from calmatch.data.resident import Source
    from calmatch.setup import Parts  # brings networks and datasets, seconds that readers spare

FREE = (
    "device",
    "compile",
    "engine",
    "eval_batch",
    "source",
    "memory",
    "workers",
    "on_nan",
)  # may change when a run is continued
RESAMPLES = 500  # of the bootstrap behind every interval
OFTEN = 20  # evaluations in a run from which compiling them pays


class Run(NamedTuple):
    """A finished run: its folder, its config and its result."""

    folder: Path
    config: Config
    result: dict[str, Any]

    @property
    def title(self) -> str:
        return str(self.result["title"])

    @property
    def data(self) -> str:
        """What it learned from, for people: a dataset's name, or the name of their own folder."""
        item = spec.parse(self.config.dataset)
        own = item.name in ("pictures", "folder") and item.kwargs.get("root")
        return Path(str(own)).name if own else self.config.dataset

    def lines(self, kind: str = "train") -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of one kind."""
        lines = runfiles.read_lines(self.folder / "metrics.jsonl")
        return [line for line in lines if line["kind"] == kind]

    def predictions(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N, C] and labels [N] of the test set."""
        path = self.folder / "predictions.npz"
        found = runfiles.read_predictions(path, len(self.result["classes"]))
        return torch.from_numpy(found["log_probs"]), torch.from_numpy(found["labels"])


def name(config: Config) -> str:
    """A folder name a person can read, with a hash that tells configs apart."""
    words = re.sub(
        r"[^\w.]+", "-", f"{config.dataset}-{config.labels}-{config.method}-{config.penalty}"
    )
    code = hashlib.blake2b(json.dumps(config.dump()).encode(), digest_size=4).hexdigest()
    return f"{words.strip('-')[:60]}-s{config.seed}-{code}"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The lock of a run folder, held by the first rank."""
    with checkpoint.lock(folder) if parallel.rank() == 0 else nullcontext():
        yield


def load(folder: Path) -> Run:
    """A finished run from its folder."""
    checkpoint.no_links(folder)
    if not all((folder / name).is_file() for name in ("config.json", "result.json")):
        raise ValueError(f"{folder} is not the folder of a finished run.")
    config = Config().replace(**runfiles.read_json(folder / "config.json"))
    configs.check(config)
    return Run(folder, config, runfiles.read_result(folder / "result.json"))


def finished(folder: Path, config: Config) -> Run | None:
    """The run in this folder if it is done; a ValueError if it is another run."""
    path = folder / "config.json"
    if not path.exists():
        return None
    try:  # a field that is younger than the run had its default
        before = Config().dump() | runfiles.read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} is damaged; choose another --out.") from error
    other = [k for k, v in config.dump().items() if before.get(k) != v and k not in FREE]
    if other:
        key = other[0]
        raise ValueError(
            f"{folder} holds a run with {key}={before.get(key)!r}, not {config.dump()[key]!r}; "
            f"choose another --out."
        )
    return load(folder) if (folder / "result.json").exists() else None


def begin(folder: Path, config: Config, parts: Parts) -> None:
    """Write what is known before the first step."""
    if parallel.rank() > 0 or (folder / "split.json").exists():
        return
    checkpoint.write_json(folder / "config.json", config.dump())
    checkpoint.write_json(folder / "environment.json", environment(parts.device))
    rule = {"rule": "usb", "seed": config.split_seed, "dataset": config.dataset}
    checkpoint.write(folder / "split.json", json.dumps({**rule, **parts.split._asdict()}))


def predictor(config: Config, parts: Parts) -> evaluate.Predictor:
    """For the evaluations of a run that goes on: as fast as it trains, compiled where it pays."""
    cuda = parts.device.type == "cuda"
    often = config.eval_every > 0 and config.steps / config.eval_every >= OFTEN
    return evaluate.Predictor(
        parts.judged,
        parts.method,
        parts.statistics,
        config.eval_batch,
        bf16=config.precision == "bf16",
        compiled=cuda and often and config.compile is not False,
    )


def measure(parts: Parts, predict: evaluate.Predictor) -> dict[str, dict[str, float]]:
    """Metrics of the weights of now on each set."""
    values = {}
    for split, (pictures, labels) in parts.sets.items():
        found = evaluate.measure(predict(pictures), labels)
        values[split] = {metric: item.value for metric, item in found.items()}
    return values


def finish(
    folder: Path,
    config: Config,
    parts: Parts,
    best: Mapping[str, Tensor],
    best_step: int | None,
    quiet: bool,
) -> Run:
    """Predict the test set with the chosen weights and write everything that outlives the run."""
    net = parts.judged
    if best:
        net.load_state_dict(best)
    pictures, labels = parts.sets["test"]
    log_probs = _predict(config, parts, pictures, net)
    unlabelled = _unlabelled(config, parts)
    averaged = parts.momentum > 0 and not best and not parts.method.ema
    plain = _predict(config, parts, pictures, parts.net) if averaged else None
    held_out, truth = parts.sets.get("validation", (None, labels))
    held = None
    if config.fold and held_out:
        held = [_predict(config, parts, held_out, one) for one in (net, parts.net)]
    if parallel.rank() == 0:
        log.tell("Measuring, with bootstrap intervals ...", quiet)
        _write_model(folder, config, parts)
        packed = io.BytesIO()
        more: dict[str, Any] = {} if plain is None else {"plain_log_probs": plain.numpy()}
        if held is not None:
            more |= {"held_labels": truth.numpy(), "held_log_probs": held[0].numpy()}
            more |= {"plain_held_log_probs": held[1].numpy()} if averaged else {}
        np.savez_compressed(packed, log_probs=log_probs.numpy(), labels=labels.numpy(), **more)
        checkpoint.write(folder / "predictions.npz", packed.getvalue())
        seen = examples.Seen(log_probs, _take(pictures))
        examples.write(folder, seen, labels, unlabelled[0] if unlabelled else None)
        result = _result(folder, config, parts, log_probs, labels)
        if unlabelled:
            views.write(folder, unlabelled[1])
            result["temperature_scaled"]["views"] = scaled.without_labels(
                unlabelled[1], log_probs, labels
            )
        if plain is not None:  # what the run would have been without averaged weights
            found = evaluate.measure(plain, labels)
            result["plain"] = {"metrics": {k: v._asdict() for k, v in found.items()}}
            result["plain"]["temperature_scaled"] = scaled.with_labels(plain, labels)
        result["step"] = best_step or config.steps
        checkpoint.write_json(folder / "result.json", result)
    parallel.meet()
    return load(folder)


def _predict(
    config: Config, parts: Parts, pictures: Source | views.Changed, net: nn.Module
) -> Tensor:
    return evaluate.predict(net, parts.method, pictures, parts.statistics, config.eval_batch)


def _unlabelled(config: Config, parts: Parts) -> tuple[examples.Seen, views.Views] | None:
    """Predictions of unlabelled pictures, or of a sample; labelled ones among them are left out."""
    pool = torch.tensor(parts.split.unlabelled, dtype=torch.long)
    new = (~torch.isin(pool, torch.tensor(parts.split.labelled))).nonzero()[:, 0]
    if not len(new):
        return None
    some = examples.sample(new, stream_seed(config.seed, 7))
    pictures = parts.batches.sources["u"].some(some)
    found = {"plain": _predict(config, parts, pictures, parts.judged)}
    for name, transform in parts.batches.views.items():
        changed = views.Changed(pictures, transform, config.seed)
        found[name] = _predict(config, parts, changed, parts.judged)
    seen = examples.Seen(found["plain"], _take(pictures), rows=pool[some], whole=len(new))
    return seen, views.Views(found, parts.truth[some.to(parts.truth.device)].cpu())


def _take(pictures: Source) -> examples.Take:
    shown: Source = getattr(pictures, "pictures", pictures)  # a frozen network's are features
    return lambda rows: torch.cat([some.cpu() for some in shown.some(rows).batches(256)])


def _result(
    folder: Path, config: Config, parts: Parts, log_probs: Tensor, labels: Tensor
) -> dict[str, Any]:
    gaps = evaluate.gap(log_probs.double())
    spread = 1.96 * float(gaps.std()) / len(gaps) ** 0.5
    # a fold's run is there for the labels it held out
    found = evaluate.measure(log_probs, labels, resamples=0 if config.fold else RESAMPLES)
    measured = {name: item._asdict() for name, item in found.items()}
    mean = float(gaps.mean())
    measured["gap"] = {"value": mean, "low": mean - spread, "high": mean + spread}
    lines = runfiles.read_lines(folder / "metrics.jsonl")
    last = [line for line in lines if line["kind"] == "train"][-1]
    if last.get("agree") is not None:
        measured["agree"] = _agreement(last, config, parts)
    return {
        "title": parts.title,
        "classes": list(parts.classes),
        "steps": config.steps,
        "selected": "best error on the TEST set (leaky)"
        if config.protocol == "paper"
        else config.select,
        "leaky": config.protocol == "paper",
        "weights": "ema" if parts.momentum else "plain",
        "pictures": {
            "labelled": len(parts.split.labelled),
            "unlabelled": len(parts.split.unlabelled),
            "validation": len(parts.split.validation),
            "test": len(labels),
        },
        "metrics": measured,
        "best_on_test": best_on_test(lines),
        "temperature_scaled": scaled.with_labels(log_probs, labels),
        "interval": "95 % bootstrap over test pictures, one seed",
        "notes": [*parts.notes, *_rollbacks(lines)],
    }


def _rollbacks(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    return [
        f"Numbers stopped being finite; from step {line['step']:,} on the learning rate was "
        f"{line['rate']:g} of what the config says."
        for line in lines
        if line["kind"] == "rollback"
    ]


def best_on_test(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What choosing the step by its error on the TEST set would report, as the paper and USB do."""
    tested = [line for line in lines if line["kind"] == "test"]
    best = min(tested, key=lambda line: line["error"])
    return {"evaluations": len(tested), **{k: best[k] for k in ("step", "error", "ece", "nll")}}


def _agreement(last: Mapping[str, Any], config: Config, parts: Parts) -> dict[str, float]:
    """Share of agreeing samples among accepted ones in the last log interval, Wilson interval."""
    steps = (config.steps - 1) % config.log_every + 1
    n = max(1.0, last["accepted"] * steps * parts.batches.orders["u"].batch)
    p, z = last["agree"], 1.96
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    spread = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return {"value": p, "low": middle - spread, "high": middle + spread}


def _write_model(folder: Path, config: Config, parts: Parts) -> None:
    from calmatch import modelfile  # brings networks, seconds that readers of results spare

    found = parts.whole() if parts.whole else (parts.judged, parts.statistics)
    if found is None:
        return
    net, statistics = found
    at = looks.chosen(config.looks, config.weak)
    modelfile.write(
        folder,
        net,
        parts.method,
        net=config.net,
        method=config.method,
        classes=list(parts.classes),
        size=parts.size,
        mean=list(statistics[0]),
        std=list(statistics[1]),
        **({"looks": at} if len(at) > 1 else {}),
        versions=environment(parts.device)["versions"],
        provenance={
            "data": config.dataset,
            "labels": len(parts.split.labelled),
            "steps": config.steps,
            "seed": config.seed,
            "command": f"calmatch train {folder.name}/config.json --out FOLDER",
        },
    )
