"""One flat, frozen, typed Config is a run; it reads from and writes to JSON or YAML."""

import dataclasses
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from calmatch import files, spec

LARGEST_NUMBER = 1e300  # beyond it arithmetic overflows
SMALLEST = dict.fromkeys("batch ratio steps log_every chunk eval_batch".split(), 1)
SHARES = "memory validation momentum layer_decay ema cap_threshold".split()
SPECS = "dataset method net labelled_loss unlabelled_loss penalty weak strong".split()
WITH_CROSS_ENTROPY = ("cross_entropy", "smoothing", "focal")  # these contain the cross-entropy
# may change when a run is continued:
FREE_FIELDS = "device compile engine eval_batch source memory workers on_nan".split()


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's result."""

    dataset: str = "digits"  # Which pictures: a name of `calmatch datasets`.
    # How many labelled pictures in all, the same number a class; 0: as the dataset says.
    labels: int = 40
    split_seed: int = 0  # Chooses which pictures are labelled, apart from `seed`.
    # Share of each class's training pictures held out, with labels, to choose a checkpoint.
    validation: float = 0.0
    # Hold out this fold of the labels (1, 2, ...), to be predicted at the end; 0: none.
    fold: int = 0
    # Whether the labelled pictures also serve as unlabelled ones, as the field does.
    include_labelled: bool = True
    # Who teaches whom: a name of `calmatch methods`, with arguments if wanted.
    method: str = "fixmatch"
    net: str = "small"  # The network: a name of `calmatch nets`.
    labelled_loss: str = ""  # Loss on labelled pictures; empty: the method's own.
    unlabelled_loss: str = ""  # Loss on unlabelled pictures; empty: the method's own.
    penalty: str = ""  # Added to the unlabelled loss, `margin(m=10)` for example.
    # Lower a fixed threshold to the confidence at this share of the margin, 0.7 say; 0: never.
    cap_threshold: float = 0.0
    weak: str = "flip|crop(4)"  # The weak view: transforms joined by |.
    strong: str = "flip|crop(4)|cutout(0.5)"  # The strong view: transforms joined by |.
    batch: int = 8  # Labelled pictures a step.
    ratio: int = 1  # Unlabelled pictures for each labelled one.
    steps: int = 1000  # Training steps.
    seed: int = 0  # Of weights, order and augmentation.
    optimizer: Literal["adamw", "sgd"] = "adamw"  # AdamW, or SGD with Nesterov momentum.
    lr: float = 5e-4  # Highest learning rate.
    weight_decay: float = 5e-4  # Weight decay; biases, norms and position embeddings are exempt.
    momentum: float = 0.9  # Of SGD.
    layer_decay: float = 1.0  # Each layer further from the head learns this much slower.
    warmup: int = 0  # Steps over which the learning rate rises from zero.
    # How the learning rate falls afterwards: cos(7 pi t / 16), or not at all.
    schedule: Literal["cosine", "constant"] = "cosine"
    clip: float = 0.0  # Largest gradient norm; 0: no limit.
    # Momentum of the averaged weights that are evaluated; 0: none; unset: the method's own.
    ema: float | None = None
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"  # Arithmetic of the network while training.
    compile: bool | Literal["net"] | None = None
    """Compile the step (slow start, faster steps); net: of a captured step the network alone, which
    other methods' runs find compiled; unset: the step on a CUDA device."""
    # Replay the step from one captured graph (auto: on a CUDA device), or run it as written.
    engine: Literal["auto", "eager", "captured"] = "auto"
    device: str = "auto"  # cuda, mps, cpu, or auto: the first of these that is there.
    log_every: int = 50  # Steps between log lines.
    eval_every: int = 0  # Steps between evaluations; 0: only at the end.
    checkpoint_every: int = 0  # Steps between checkpoints; 0: ten in a run.
    eval_batch: int = 512  # Pictures at a time when predicting.
    select: str = "last"  # Which weights to keep: last, or best(METRIC) on the validation share.
    # paper: keep the weights that are best on the TEST set, as the paper and USB do.
    protocol: Literal["held-out", "paper"] = "held-out"
    # Pictures on the device, or fetched by workers; auto: on the device where they fit.
    source: Literal["auto", "resident", "stream"] = "auto"
    memory: float = 0.5  # The share of free device memory that pictures may take.
    workers: int = 2  # Processes that fetch streamed pictures.
    chunk: int = 16  # Steps augmented at once (changes the draws, not their distribution).
    # Numbers that are not finite: stop, or go back to a checkpoint and halve the learning rate.
    on_nan: Literal["stop", "rollback"] = "stop"
    # The same bits every time on a CUDA device too (slower); a CPU always computes so.
    deterministic: bool = False

    def replace(self, /, **changes: Any) -> "Config":
        """A copy with some fields changed; an unknown field gets the nearest suggestion."""
        known = [field.name for field in dataclasses.fields(self)]
        changes.pop("keep_views", None)  # which runs before 2026-11-19 have
        for name in (name for name in changes if name not in known):
            raise ValueError(f"Config has no field {name!r}.{spec.nearest(name, known)}")
        return dataclasses.replace(self, **changes)

    @property
    def saves(self) -> int:
        return self.checkpoint_every or max(1, self.steps // 10)

    def dump(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass
class TrainOptions:
    """One run. RECIPE comes first: a name of `calmatch recipes`, or a config file to repeat."""

    run: Annotated[Config, tyro.conf.arg(name="")]
    out: Path | None = None  # The run folder; the same line again continues it.
    # Train this many seeds side by side on one device, from --seed on; a folder each in --out.
    together: int = 1
    data_root: Path | None = None  # Where datasets are; also CALMATCH_DATA.
    # JSON or YAML with fields that change the recipe; flags change them again.
    config: Path | None = None
    trust: bool = False  # Import code that the config file names.
    quiet: bool = False  # No progress bar and no lines.


def load_config(path: Path, default: Config, trust: bool = False) -> Config:
    """The default changed by a JSON or YAML file.

    A dotted name would import somebody's code, so from a file it needs `trust`.
    """
    import yaml

    try:
        text = files.read_text(path)
        fields = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Cannot read {path}: {files.reason(error)}.") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON or YAML.") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold one mapping of field names to values.")
    changes = {str(key): value for key, value in fields.items()}
    for key, value in changes.items():  # YAML reads 5e-4 as text
        if isinstance(value, str) and "float" in str(Config.__annotations__.get(key)):
            with suppress(ValueError):
                changes[key] = float(value)
    config = default.replace(**changes)
    check_config(config)
    for field in SPECS:
        if text := str(getattr(config, field)):
            spec.from_file(text, path, trust, "timm" if field == "net" else "")
    return config


def check_config(config: Config) -> None:
    """Raise a ValueError for values that cannot be meant."""
    for name, hint in spec.field_types(Config).items():
        value, least = getattr(config, name), SMALLEST.get(name, 0)
        if not spec.fits(value, hint):
            raise ValueError(f"{name} cannot be {value!r}; it takes {spec.describe(hint)}.")
        if not isinstance(value, int | float):
            continue
        if not abs(value) <= LARGEST_NUMBER:
            raise ValueError(f"{name} must be a finite number, not {str(value)[:40]}.")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}.")
        if name in SHARES and value > 1:
            raise ValueError(f"{name} must lie between 0 and 1, not {value}.")
    if config.protocol == "paper" and config.select != "last":
        raise ValueError("protocol=paper keeps the best error on the test set; drop --select.")
    if selection_metric(config) and config.protocol == "held-out" and config.validation == 0:
        raise ValueError("select=best needs pictures to choose on: set --validation, 0.1 say.")
    for part in spec.added(config.penalty) if config.penalty else []:
        if part.name in WITH_CROSS_ENTROPY:
            twice = f"{part.name!r} contains the cross-entropy and would count it twice"
            advice = f"write --unlabelled-loss {config.penalty!r} instead of --penalty"
            raise ValueError(f"{twice}; {advice}.")


def without_seeds(config: Config) -> Config:
    """What runs that are trained together have in common."""
    return config.replace(seed=0, split_seed=0, fold=min(config.fold, 1))


def selection_metric(config: Config) -> str | None:
    """The metric whose best value is kept; None for the last step's weights."""
    if config.protocol == "paper":
        return "error"
    if config.select == "last":
        return None
    match = re.fullmatch(r"best\(['\"]?(\w+)['\"]?\)", config.select.strip())
    if not match:
        raise ValueError(f"select is {config.select!r}; write last or best(error).")
    return match[1]
