"""What each command takes, as typed dataclasses that tyro turns into flags: no torch is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


@dataclass
class DemoOptions:
    """FreeMatch without and with the margin on hard digits, several label splits of each."""

    out: Path = Path("demo")
    """Where the run folders and the page go; finished runs there are not repeated."""
    pairs: int = 5
    """Label splits, each learned from twice."""
    seed: int = 0
    """The first split's seed; the others follow."""
    quiet: bool = False
    """No progress bars."""


@dataclass(frozen=True)
class FitOptions:
    """A classifier of own pictures, with confidence that can be believed; no option is needed."""

    pictures: tyro.conf.Positional[Path]
    """Class folders (unlabelled/ holds the rest), or with --labels any folder of pictures."""
    labels: Path | None = None
    """A CSV with the header file,label, or what Label Studio, COCO or imagefolder write."""
    out: Path | None = None
    """The run folder; the same line again continues it. By default fit-PICTURES."""
    minutes: float = 10.0
    """About how long it may take; decides views and image size, or steps, by measuring."""
    start: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """A model to start from, made by fit or train, with new labels or pictures."""
    method: str | None = None
    """Who teaches whom: a name of `calmatch methods`; unset: the best of several, by the labels."""
    penalty: str | None = None
    """Keeps confidence in bounds while a method learns; unset: margin(cap=0.98); "": nothing."""
    net: str | None = None
    """The network: a name of `calmatch nets`; unset: a pretrained one if it can be had."""
    frozen: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only the last layer learns: the default where the network is pretrained."""
    no_frozen: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """All layers learn: the default with --from, or where nothing is pretrained."""
    tta: int | None = None
    """Test-time augmentation: views whose mean a frozen network predicts; unset: as time allows."""
    size: int | None = None
    """Pixels of a side; unset: the pretrained network's own, or from the pictures."""
    steps: int | None = None
    """Training steps instead of --minutes, where a method or the whole network learns."""
    hold: float | None = None
    """Share of the labels to hold out and evaluate on; unset: cross-validation of few."""
    weak: str | None = None
    """The weak view: transforms joined by |; unset: mirrored and shifted."""
    strong: str | None = None
    """The strong view; unset: RandAugment and cutout too."""
    batch: int | None = None
    """Labelled pictures a step."""
    seed: int = 0
    """Of everything random."""
    strict: bool = False
    """A file that cannot be decoded is an error instead of being skipped."""
    device: str = "auto"
    """cuda, mps, cpu, or auto."""
    trust: bool = False
    """Import code that the model of --from, or the folder that is continued, names."""
    quiet: bool = False
    """No progress and no words."""

    @property
    def freeze(self) -> bool | None:
        """Whether only the last layer learns; None: choose."""
        if self.frozen and self.no_frozen:
            raise ValueError("Choose --frozen or --no-frozen, or neither.")
        return True if self.frozen else False if self.no_frozen else None

    def dump(self) -> dict[str, Any]:
        """JSON of what decides the result; absolute paths: the same folder is the same option."""
        fields = {k: v for k, v in vars(self).items() if k not in ("out", "quiet", "trust")}
        return {k: str(v.resolve()) if isinstance(v, Path) else v for k, v in fields.items()}


@dataclass
class EvaluateOptions:
    """Measure a run folder, or predictions in a .npz (`probs`, `labels`) or .csv (`label`, ...)."""

    path: tyro.conf.Positional[Path]
    resamples: int = 500
    """Bootstrap resamples for the 95 % intervals; 0: none."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass
class CheckOptions:
    """Counts, undecodable files, duplicates between training and test, and the split."""

    name: tyro.conf.Positional[str]
    labels: int = 0
    """How many labels the split should have; 0: four a class, or as the dataset says."""
    split_seed: int = 0
    """Chooses which pictures are labelled."""
    data_root: Path | None = None
    """Where datasets are; also CALMATCH_DATA."""


@dataclass
class ReportOptions:
    """Make one page from run folders."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    out: Path | None = None
    """The page; by default report.html in the run folder, of several runs in the folder above."""
    tensorboard: bool = False
    """Also write each run's log as TensorBoard event files, in its folder tensorboard/."""


@dataclass
class ReplayOptions:
    """Train a run's config again and compare the numbers; the run folder is only read."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run folder; RUN/fault repeats the step whose numbers were not finite."""
    steps: int | None = None
    """Only the first steps; by default all, of an unfinished run as many as it has logged."""
    tolerance: float = 1e-3
    """The largest difference that counts as the same; further away is exit code 1."""
    device: str | None = None
    """Another device than the run's config names, cpu for example."""
    data_root: Path | None = None
    """Where datasets are; also CALMATCH_DATA."""
    trust: bool = False
    """Import code that the config names."""
    quiet: bool = False
    """No progress bar; only the verdict."""


@dataclass
class PredictOptions:
    """Answers for pictures: a table with the columns file, label, confidence, set, sure."""

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """A run folder, or hf://USER/NAME on the Hugging Face Hub."""
    pictures: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PICTURES")]
    """A folder (and those in it), a .zip, or one picture."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("predictions.csv")
    """A .csv or .parquet file."""
    format: Literal["label-studio", "fiftyone", "camera-trap"] | None = None
    """Another program's file instead: Label Studio or FiftyOne (.json), Camtrap DP (.csv)."""
    strict: bool = False
    """Stop at a file that cannot be decoded; by default such files are listed and skipped."""
    batch: int = 0
    """Pictures computed together; 0: as many as suit the device."""
    workers: int = 0
    """Threads that decode pictures, and on a CPU compute; 0: one for each core."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    engine: Literal["local", "ray"] = "local"
    """ray spreads the work over a cluster whose nodes all see the pictures."""
    address: str | None = None
    """The Ray cluster; by default the one running here, or a new one."""
    trust: bool = False
    """Import code that the model names."""
    quiet: bool = False
    """No progress bar and no lines."""


@dataclass
class ExportOptions:
    """A model as one file for other programs: bytes in, calibrated probabilities out."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    to: Literal["onnx", "pt2"] = "onnx"
    """onnx runs anywhere; pt2 is torch.export's own."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """The file; by default model.onnx or model.pt2 in the run folder."""
    trust: bool = False
    """Import code that the model names."""
    quiet: bool = False
    """No lines."""


@dataclass
class PushOptions:
    """Weights, a card and a figure, made from the run; `hf auth login` first, or set HF_TOKEN."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="USER/NAME")]
    """The repository; it is made if it is not there."""
    private: bool = False
    """A new repository is private."""


@dataclass
class BenchOptions:
    """Every run of a suite; the same line again goes on where it was. No SUITE: a list of them."""

    suite: tyro.conf.Positional[str]
    out: Path = Path("runs")
    """Where the run folders, the table and the figures go."""
    seeds: tuple[int, ...] = ()
    """Which seeds; by default the suite's own, 0 1 2."""
    engine: Literal["local", "ray"] = "local"
    """Where runs happen: on this machine's devices, or on a Ray cluster."""
    address: str | None = None
    """The Ray cluster's address; by default Ray starts on this machine."""
    jobs: int = 0
    """Runs at once on a device (GPU, or CPU); 0: three seeds a GPU, one a core."""
    minutes: float = math.inf
    """Stop after so long, by checkpoint; a run that would not be done by then is not begun."""
    only: str = ""
    """Only runs with this text, or one of several with commas between, in row, column or folder."""
    dry_run: bool = False
    """Print the runs, how they stand and how long they will take; run none."""
    index: int | None = None
    """Do only the run with this number of --dry-run, for array jobs: its exit code is ours."""
    data_root: Path | None = None
    """Where datasets are; also CALMATCH_DATA."""
    steps: int | None = None
    """Fewer steps than published, to try a suite out; choose another --out for that."""
    protocol: Literal["held-out", "paper"] | None = None
    """Which weights count in every run; paper: the best on the TEST set."""
    net: str | None = None
    """Another network in every run, a name of `calmatch nets` with arguments if wanted."""
    weights: Path | None = None
    """A file that pretrained networks start from, instead of the published weights."""
    quiet: bool = False
    """No live table and no lines but the summary."""


@dataclass
class TableOptions:
    """Tables of run folders: means over seeds, both protocols, ranks, paired differences."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    to: Literal["md", "latex", "csv", "html"] | None = None
    """The format; by default what the file's name ends in, else Markdown."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """A file instead of the console."""
    suite: str | None = None
    """Only the cells of this suite, in its order."""
    published: bool = False
    """The paper's numbers beside ours, doubtful ones marked with the reason."""


@dataclass
class FigureOptions:
    """A figure of the paper from run folders."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """An .svg, .pdf or .png; by default NAME.svg here."""
    suite: str | None = None
    """Only the cells of this suite, in its order."""
    column: str | None = None
    """Only this column (`eurosat_40`); most figures are made for one."""
    target: int = 5
    """The class whose logits are shown (figure logits)."""
    published: bool = False
    """Draw the paper's own numbers (figures ranks and radar); needs no runs."""


def __getattr__(name: str) -> Any:
    """The options of `train` stand beside the config they hold, which predicting does without."""
    if name != "TrainOptions":
        raise AttributeError(name)
    from calmatch.training.config import TrainOptions

    return TrainOptions
