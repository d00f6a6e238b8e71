"""A model as one ONNX or PT2 file: bytes in, calibrated probabilities out, checked when made."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calmatch import __version__, files
from calmatch.model import Model

TOLERANCE = 1e-4  # largest difference of a probability from `Model.probabilities`
PREPROCESSING = (
    "As calmatch.data.images.decode: turned upright (EXIF), 8-bit RGB; the shorter side resized to "
    "{size} by Pillow's bilinear filter (antialiased), keeping the aspect; {size} x {size} cut out "
    "of the centre; uint8 [N, 3, {size}, {size}]. "
    "Normalisation, test-time augmentation and calibration are in the model."
)


class Calibrated(nn.Module):
    """The whole of it: uint8 images [N, 3, size, size] to calibrated probabilities [N, C]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network, self.calibration = model.network, model.calibration

    def forward(self, images: Tensor) -> Tensor:
        return self.calibration(self.network(images)).exp()


def export(model: Model, path: Path | str, to: str = "onnx") -> Path:
    """Write the model as `onnx` or `pt2`; a file that disagrees with the model is not written."""
    path = Path(path)
    if to not in ("onnx", "pt2"):
        raise ValueError(f"There is no export to {to!r}; known: onnx, pt2.")
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"{path} cannot be written: its folder is not there, or it is a folder.")
    model.to("cpu")
    generator = torch.Generator().manual_seed(0)
    shape = (3, 3, model.size, model.size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    data = (_onnx if to == "onnx" else _pt2)(model, images)
    check_export(data, to, model, images)
    files.write(path, data)
    return path


def check_export(data: bytes, to: str, model: Model, images: Tensor) -> None:
    """Refuse a file whose probabilities differ from the model's, for one image or several."""
    run = (_run_onnx if to == "onnx" else _run_pt2)(data)
    for some in (images, images[:1]):
        away = float((run(some) - model.probabilities(some)).abs().max())
        if not away <= TOLERANCE:
            raise ValueError(
                f"The {to} file differs from the model by {away:.1e}, so it is not kept; "
                f"please report this with the network's name."
            )


def export_metadata(model: Model) -> dict[str, str]:
    """What a program needs to know, as texts; everything but the preprocessing is JSON."""
    keys = ("calibration", "conformal", "selective", "licence")
    facts = {"classes": list(model.classes), "size": model.size, "provenance": model.provenance}
    facts |= {key: model.note.get(key) for key in keys} | {"calmatch": __version__}
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in facts.items()}
    return {"preprocessing": PREPROCESSING.format(size=model.size), **texts}


def _pt2(model: Model, images: Tensor) -> bytes:
    content = io.BytesIO()
    with _silence_exporters():
        torch.export.save(_program(model, images), content, extra_files=export_metadata(model))
    return content.getvalue()


def _program(model: Model, images: Tensor) -> Any:
    shapes = {"images": {0: torch.export.Dim("pictures", min=1)}}
    return torch.export.export(Calibrated(model).eval(), (images,), dynamic_shapes=shapes)


def _run_pt2(data: bytes) -> Any:
    with _silence_exporters():
        return torch.export.load(io.BytesIO(data)).module()


def _onnx(model: Model, images: Tensor) -> bytes:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "ONNX files need an extra: pip install 'calmatch[onnx]', or use --to pt2."
        ) from error
    names: Any = {"input_names": ["images"], "output_names": ["probabilities"]}
    with _silence_exporters():
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
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@contextmanager
def _silence_exporters() -> Iterator[None]:
    """Exporters talk about themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
