"""calmatch.Classifier: the same for arrays, as a scikit-learn estimator (y == -1: unlabelled)."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from calmatch import fit, metrics, posthoc
from calmatch.data.images import square_image
from calmatch.fit import ask, crossval
from calmatch.fit.plan import METHOD
from calmatch.metrics import read_predictions_for_html
from calmatch.model import load_model
from calmatch.ops import pick_device
from calmatch.options import FitOptions
from calmatch.runs import ASKED, load_examples

Array = NDArray[Any]


class Classifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A semi-supervised classifier with calibrated probabilities.

    X is an array of pictures, [N, H, W], [N, H, W, 3] or [N, 3, H, W] with bytes or numbers in
    [0, 1], or of feature vectors [N, D], for which one linear layer learns by the same methods.
    In y, -1 (and in arrays of objects None) means unlabelled.

    Settings are those of `calmatch fit`; for vectors `method` is freematch unless another is named,
    `steps` are 300, and net, frozen, tta, minutes and device do not matter.

    Attributes:
        classes_: class names, sorted.
        kept_: of vectors, the method that was better by cross-validation: `method` or supervised.
        calibration_: the temperature; of vectors chosen by cross-validation.
        held_out_: of vectors, the out-of-fold predictions it rests on; None with too few labels.
    """

    def __init__(
        self,
        method: str | None = None,
        penalty: str | None = None,
        *,
        net: str | None = None,
        frozen: bool | None = None,
        tta: int | None = None,
        steps: int | None = None,
        minutes: float = 2.0,
        device: str = "auto",
        random_state: Any = 0,
    ) -> None:
        self.method, self.penalty, self.net, self.frozen = method, penalty, net, frozen
        self.tta, self.steps, self.minutes, self.device = tta, steps, minutes, device
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Learn from labelled and unlabelled rows."""
        for name in [name for name in vars(self) if name.endswith("_")]:
            delattr(self, name)  # what an earlier fit learned
        if y is None:
            raise ValueError("Classifier requires y to be passed, but the target y is None.")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}.")
        values = y.tolist() if isinstance(y, np.ndarray) and y.dtype == object else y
        if isinstance(values, list | tuple):  # numpy would make texts of all
            known = [v for v in values if not (v is None or str(v) in ("-1", "-1.0"))]
            if len({isinstance(value, str) for value in known}) > 1:
                raise ValueError("The labels mix texts and numbers; use one kind in y.")
        X = X if hasattr(X, "shape") else np.asarray(X)  # noqa: N806
        if pictures := len(X.shape) > 2:
            X = check_array(X, allow_nd=True, ensure_2d=False, dtype=None)  # noqa: N806
            y = column_or_1d(check_array(y, ensure_2d=False, dtype=None, ensure_all_finite=False))
            if len(X) != len(y):
                raise ValueError(f"X has {len(X)} rows and y {len(y)}.")
            self.shape_ = X.shape[1:]
        else:
            kinds = [np.float64, np.float32]
            X, y = validate_data(self, X, y, dtype=kinds, ensure_min_samples=2)  # noqa: N806
        ids = self._ids(np.asarray(y))
        state = self.random_state
        drawn = state if isinstance(state, int) else check_random_state(state).randint(2**31)
        self.seed_ = int(drawn)
        if pictures:
            self.unit_ = X.dtype.kind == "f" and float(X.max()) <= 1
            self._fit_pictures(as_bytes(X, self.unit_), ids)
        else:
            self._seen = X, ids
            self._fit_vectors(torch.tensor(X), torch.from_numpy(ids))
        return self

    def _ids(self, y: Array) -> NDArray[np.int64]:
        """Class ids; -1 stays unlabelled."""
        y = y.ravel()
        blank = np.array([value is None or str(value) in ("-1", "-1.0") for value in y.tolist()])
        if not (~blank).any():
            raise ValueError("No row has a label; -1 means unlabelled.")
        known = y[~blank]
        if known.dtype == object:
            known = np.array(known.tolist())
        check_classification_targets(known)
        self.classes_ = np.unique(known)
        if len(self.classes_) < 2:
            raise ValueError("Classifier needs two or more classes; the labels have one class.")
        ids = np.full(len(y), -1, dtype=np.int64)
        ids[~blank] = np.searchsorted(self.classes_, known)
        return ids

    def _fit_vectors(self, x: Tensor, ids: Tensor) -> None:
        asked = (self.method or METHOD, self.penalty, self.steps, self.seed_)
        config = crossval.head_config(*asked, x.shape[1])
        scale = float(x.abs().max()) or 1.0  # squares of tiny or huge numbers are no numbers
        scaled = x.double() / scale
        self.held_out_, self.evaluated_ = None, None
        self.calibration_ = posthoc.Scaling("identity")
        alone = config.replace(method="supervised", penalty="")
        frozen = crossval.freeze_vectors(config, scaled, ids, len(self.classes_))
        tried = {one: replace(frozen, config=one) for one in (config, alone)}
        if bool((torch.bincount(ids[ids >= 0]) > 1).any()):
            held = {one: crossval.cross_validate(frozen) for one, frozen in tried.items()}
            config = min(held, key=lambda one: crossval.log_loss(held[one]))
            known = self.held_out_ = held[config]
            self.calibration_ = posthoc.crossfit_temperature(known.log_probs, known.labels)
            probs = self.calibration_(known.log_probs).double().softmax(-1)
            self.evaluated_ = (probs, known.labels)
        self.kept_ = config.method
        weight, bias = tried[config].train()
        self.coef_, self.intercept_ = (weight / scale).numpy(), bias.numpy()

    def _fit_pictures(self, pictures: NDArray[np.uint8], ids: NDArray[np.int64]) -> None:
        """Through the same door as a folder: files and a CSV."""
        with tempfile.TemporaryDirectory() as place:
            root = Path(place) / "pictures"
            root.mkdir()
            for row, picture in enumerate(pictures):
                Image.fromarray(picture).save(root / f"{row:09d}.png", compress_level=1)
            table = Path(place) / "labels.csv"
            lines = [f"{row:09d}.png,{ids[row]}\n" for row in np.flatnonzero(ids >= 0)]
            table.write_text("".join(["file,label\n", *lines]), encoding="utf-8")
            names = "minutes method penalty net tta steps device".split()
            own: dict[str, Any] = {name: getattr(self, name) for name in names}
            own |= {"frozen": self.frozen is True, "no_frozen": self.frozen is False}
            own |= {"out": Path(place) / "run", "seed": self.seed_, "quiet": True}
            run = fit.fit(FitOptions(root, table, **own))
            self.model_ = load_model(run.folder, device=pick_device(self.device))
            self.result_ = run.result
            examples = load_examples(run.folder)
            names = examples.asked_files if examples else []
            self.asked_ = [int(Path(name).stem) for name in names]
            self.evaluated_ = read_predictions_for_html(run.folder)
        self.calibration_ = self.model_.calibration

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Calibrated probabilities [N, C], in the order of `classes_`."""
        check_is_fitted(self, "classes_")
        if hasattr(self, "model_"):
            X = check_array(X, allow_nd=True, ensure_2d=False, dtype=None)  # noqa: N806
            if X.shape[1:] != self.shape_:
                raise ValueError(f"Pictures were {self.shape_} in fit and are {X.shape[1:]} now.")
            how = (self.model_.size, self.model_.squash)  # as the files were, when decoded
            pixels = [square_image(Image.fromarray(each), *how) for each in as_bytes(X, self.unit_)]
            probs = self.model_.probabilities(torch.from_numpy(np.stack(pixels)))
        else:
            X = validate_data(self, X, dtype=np.float64, reset=False)  # noqa: N806
            logits = X @ self.coef_.T + self.intercept_
            probs = self.calibration_(torch.from_numpy(logits)).exp()
        values: Array = probs.double().numpy()
        values /= values.sum(1, keepdims=True)
        return values

    def predict(self, X: Any) -> Array:  # noqa: N803
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(1)  # first: it says that nothing was fitted
        labels: Array = self.classes_[best]
        return labels

    def ask(self, n: int = 10) -> Array:
        """Rows of `fit`'s X whose label would teach most, best first; of pictures 24 at most."""
        check_is_fitted(self, "classes_")
        if n < 1 or (hasattr(self, "model_") and n > ASKED):
            raise ValueError(f"n must be 1 to {ASKED}; label those first, and fit again.")
        if hasattr(self, "model_"):
            return np.array(self.asked_[:n], dtype=np.int64)
        x, ids = self._seen
        centred = x - x.mean(0)
        space = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
        probs = self.predict_proba(x)
        return ask.ask([space], np.flatnonzero(ids >= 0), probs, n, seed=self.seed_)

    def _repr_html_(self) -> str:
        """scikit-learn's drawing; of a fitted one also its out-of-fold reliability."""
        html = str(super()._repr_html_())
        if (known := getattr(self, "evaluated_", None)) is None:
            return html
        names = ("error", "ece", "nll")
        rows = {name: f"{float(getattr(metrics, name)(*known)):.4f}" for name in names}
        return html + metrics.as_html("Out-of-fold", {**rows, "labels": len(known[1])}, known)

    def _repr_mimebundle_(self, **settings: Any) -> Any:
        """What Jupyter asks for first; scikit-learn's own does not call `_repr_html_`."""
        shown = super()._repr_mimebundle_(**settings)
        return shown | {"text/html": self._repr_html_()} if "text/html" in shown else shown

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


def as_bytes(x: Array, unit: bool) -> NDArray[np.uint8]:
    """Pictures as bytes [N, H, W, 3]; `unit`: they were numbers in [0, 1]."""
    if x.ndim == 3:
        x = np.repeat(x[..., None], 3, -1)
    if x.ndim != 4 or (x.shape[-1] != 3 and x.shape[1] != 3):
        shapes = "[N, H, W], [N, H, W, 3] or [N, 3, H, W]"
        raise ValueError(f"Pictures are {shapes}, not {list(x.shape)}.")
    if x.shape[-1] != 3:
        x = x.transpose(0, 2, 3, 1)
    if x.dtype != np.uint8:
        low, high = float(x.min()), float(x.max())
        if low < 0 or high > (1 if unit else 255) or (not unit and (x % 1).any()):
            raise ValueError(f"Pictures hold bytes, or numbers in [0, 1]; these {low} to {high}.")
        x = (x * (255 if unit else 1)).round().astype(np.uint8)
    return np.ascontiguousarray(x)
