"""A model as one ONNX or PT2 file: bytes of any size in, probabilities, sets and sure out."""

import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calmatch import __version__, files, spec
from calmatch.model import Model

TOLERANCE = 1e-4  # largest difference of a probability from `Model.probabilities`
OUTPUTS = ("probabilities", "set", "sure")
PREPROCESSING = (
    "images: uint8 [N, 3, H, W], RGB, turned upright (EXIF), of any height and width. Resizing (as "
    "Pillow does, antialiased: {how} to {size} x {size}), normalisation, test-time augmentation "
    "and calibration are in the model. probabilities: float [N, C], of `classes` in order; set: "
    "bool [N, C], the prediction set, empty without a promise; sure: bool [N]."
)


class Calibrated(nn.Module):
    """The whole of it: uint8 [N, 3, H, W] to probabilities [N, C], sets [N, C] and sure [N]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network, self.calibration = model.fused(portable=True), model.calibration
        self.size, self.squash, self.conformal = model.size, model.squash, model.conformal
        self.sure = model.sure

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs = self.calibration(self.network(resize_square(images, self.size, self.squash))).exp()
        sets = self.conformal.sets(probs) if self.conformal else torch.zeros_like(probs).bool()
        return probs, sets, self.sure(probs.amax(1))


def resize_square(images: Tensor, size: int, squash: bool) -> Tensor:
    """What `square_image` does with Pillow, as two products, which any runtime can compute."""
    high, wide = images.shape[-2:]
    across, down = (_weights(*sides, size, squash) for sides in ((wide, high), (high, wide)))
    rows = (images.float() @ across.T + 0.5).floor().clamp(0, 255)
    return (down @ rows + 0.5).floor().clamp(0, 255).to(torch.uint8)


def _weights(side: int, other: int, size: int, squash: bool) -> Tensor:
    """How much each pixel of a side counts in each new one: [size, side].

    Lengths are tensors, so that one graph is made for all sizes.
    """
    length, least = (torch.ones(n, dtype=torch.float64).sum() for n in (side, min(side, other)))
    kept = length if squash else torch.minimum(length, 4 * least)  # a strip loses its ends first
    whole = kept * size / (kept if squash else least)
    whole = whole.round().clamp_min(size)  # pixels before the middle is cut out
    first = ((whole - size) / 2).floor()
    centre = (torch.arange(size) + first + 0.5) * (kept / whole) + ((length - kept) / 2).floor()
    reach = (kept / whole).clamp_min(1)  # a smaller image: every pixel counts
    t = ((torch.arange(side) + 0.5)[None] - centre[:, None]).abs() / reach
    near, far = (1.5 * t - 2.5) * t * t + 1, ((-0.5 * t + 2.5) * t - 4) * t + 2
    cubic = torch.where(t < 1, near, torch.where(t < 2, far, 0.0))
    weight = cubic if squash else (1 - t).clamp_min(0)
    return (weight / weight.sum(1, keepdim=True)).float()


def export(model: Model, path: Path | str, to: str = "onnx") -> Path:
    """Write the model as `onnx` or `pt2`; a file that disagrees with the model is not written."""
    path = Path(path)
    if to not in ("onnx", "pt2"):
        raise ValueError(f"There is no export to {to!r}; known: onnx, pt2.")
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"{path} cannot be written: its folder is not there, or it is a folder.")
    model.to("cpu")
    how: Any = {"dtype": torch.uint8, "generator": torch.Generator().manual_seed(0)}
    images = torch.randint(0, 256, (3, 3, model.size, model.size), **how)
    odd = torch.randint(0, 256, (2, 3, 45, 61), **how)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # exporters talk about themselves
    try:
        with warnings.catch_warnings(action="ignore"):
            data = (_onnx if to == "onnx" else _pt2)(model, odd)
            check_export(data, to, model, images)
    finally:
        logging.disable(before)
    files.write(path, data)
    return path


def check_export(data: bytes, to: str, model: Model, images: Tensor) -> None:
    """Refuse a file whose probabilities differ from the model's, for one image or several."""
    run = _run_onnx(data) if to == "onnx" else torch.export.load(io.BytesIO(data)).module()
    expected = Calibrated(model).eval()
    for some in (images, images[:1]):
        probs, sets, sure = run(some)
        away = float((probs - model.probabilities(some)).abs().max())
        with torch.inference_mode():
            same = all(map(torch.equal, (sets, sure), expected(some)[1:]))
        if not away <= TOLERANCE or not same:
            why = f"The {to} file differs from the model by {away:.1e}, so it is not kept"
            raise ValueError(f"{why}; please report this with the network's name.")


def export_metadata(model: Model) -> dict[str, str]:
    """What a program needs to know, as texts; everything but the preprocessing is JSON."""
    keys = ("calibration", "conformal", "selective", "licence")
    facts = {"classes": list(model.classes), "size": model.size, "provenance": model.provenance}
    facts |= {key: model.note.get(key) for key in keys} | {"calmatch": __version__}
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in facts.items()}
    how = "all of it, bicubic," if model.squash else "the middle, bilinear,"
    return {"preprocessing": PREPROCESSING.format(size=model.size, how=how), **texts}


def _pt2(model: Model, images: Tensor) -> bytes:
    content = io.BytesIO()
    torch.export.save(_program(model, images), content, extra_files=export_metadata(model))
    return content.getvalue()


def _program(model: Model, images: Tensor) -> Any:
    names = ("pictures", "", "height", "width")
    shapes = {"images": {k: torch.export.Dim(name) for k, name in enumerate(names) if name}}
    return torch.export.export(Calibrated(model).eval(), (images,), dynamic_shapes=shapes)


def _onnx(model: Model, images: Tensor) -> bytes:
    why = "ONNX files need an extra: pip install 'calmatch[onnx]', or use --to pt2."
    op = spec.import_extra(why, "onnxscript", "onnx", "onnxruntime")[0].opset18

    def stable_sort(x: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
        number = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
        return op.TopK(x, number, axis=dim, largest=int(descending), sorted=1)  # ties: first first

    names: Any = {"input_names": ["images"], "output_names": list(OUTPUTS)}
    names["custom_translation_table"] = {torch.ops.aten.sort.stable: stable_sort}
    program = torch.onnx.export(_program(model, images), dynamo=True, verbose=False, **names)
    assert program is not None
    proto: Any = program.model_proto
    for key, value in export_metadata(model).items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    if proto.ByteSize() >= 1 << 31:
        raise ValueError("ONNX files end at 2 GB, and this model is larger; use --to pt2.")
    return bytes(proto.SerializeToString())


def _run_onnx(data: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # faults only
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> list[Tensor]:
        return [torch.from_numpy(each) for each in session.run(None, {"images": images.numpy()})]

    return run
