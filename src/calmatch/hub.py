"""Models on the Hugging Face Hub: pushed with a card made from the run, pulled by revision."""

import contextlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import yaml

from calmatch import __version__, files, spec
from calmatch.console import message, say_why
from calmatch.data.images import cache_folder
from calmatch.metrics import FEW
from calmatch.model import Model, load_model, read_model_json
from calmatch.report.charts import reliability_figure, save_figure
from calmatch.runs import Run, load_run, probabilities

ADDRESS = re.compile(r"hf:/{0,2}([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")
MODEL_FILES = ("model.json", "model.safetensors")
PREFIX = "net/body.model."  # of a timm network's tensors in our files
SHOWN = {"error": "error", "ece": "ECE (15 bins)", "smooth_ece": "smooth ECE", "nll": "log-loss"}
TASK = "image-classification"
LOCAL = re.compile(r"(^|\s)(/|~|[A-Za-z]:\\)\S")  # where files lie is nobody's business
CARD = Path(__file__).with_name("hub.md")
EXTRA = "The Hub needs an extra: pip install 'calmatch[hub]'."
LOGIN = "; is the name right, and `hf auth login` done?"


def push(folder: Path, name: str, *, private: bool = False) -> str:
    """Upload the model of a finished run with its card; the address of that very commit."""
    (hub,), run = spec.import_extra(EXTRA, "huggingface_hub"), load_run(folder)
    with tempfile.TemporaryDirectory() as place:
        write_repository(run, Path(place), name)
        with say_why(f"The Hub does not take {name}", LOGIN):
            api = hub.HfApi(library_name="calmatch", library_version=__version__)
            api.create_repo(name, private=private, exist_ok=True)
            pieces = [hub.CommitOperationAdd(p.name, p) for p in sorted(Path(place).iterdir())]
            done = api.create_commit(name, pieces, commit_message=f"{run.title} by calmatch")
    return f"hf://{name}@{done.oid}"


def pull(address: str) -> Path:
    """The folder of a model on the Hub, fetched once; without a revision the newest commit's."""
    match = ADDRESS.fullmatch(address.replace("\\", "/"))
    if match is None:
        raise ValueError(f"{address!r} is no model on the Hub: hf://USER/NAME, or ...@REVISION.")
    (hub,), (name, revision) = spec.import_extra(EXTRA, "huggingface_hub"), match.groups()
    with say_why(f"The Hub does not give {name}", LOGIN):
        if not re.fullmatch("[0-9a-f]{40}", revision or ""):
            revision = str(hub.HfApi().model_info(name, revision=revision).sha)
            if not re.fullmatch("[0-9a-f]{40}", revision):  # a folder will be called so
                raise ValueError(f"{revision!r:.60} is no commit.")
        folder = cache_folder() / "hub" / name.replace("/", "--") / revision
        for file in MODEL_FILES:  # and nothing else that may be there
            if not (folder / file).is_file():
                hub.hf_hub_download(name, file, revision=revision, local_dir=folder)
    _take_timm_names(folder / MODEL_FILES[1])
    message(f"Model: hf://{name}@{revision}")
    return folder


def write_repository(run: Run, place: Path, name: str) -> None:
    """What the Hub shows and others load: weights, model.json, config.json, card, one figure."""
    model = load_model(run.folder)
    note = read_model_json(run.folder / "model.json")
    note["net"] = model.note["net"]  # without the file that it started from
    note["provenance"] |= {"data": run.data}  # a folder's name, not where it lies, nor its command
    note["provenance"].pop("command", None)
    files.write_json(place / "model.json", note)
    weights = safetensors.torch.load_file(files.regular(run.folder / "model.safetensors"))
    body: Any = model.network.net.body
    config = body.model.pretrained_cfg if all(key.startswith(PREFIX) for key in weights) else {}
    if in_timm := bool(config.get("architecture")):
        weights = {key.removeprefix(PREFIX): value for key, value in weights.items()}
        _write_timm_config(body, model, place / "config.json")
    else:
        facts = {"library_name": "calmatch", "net": note["net"], "label_names": note["classes"]}
        files.write_json(place / "config.json", facts)
    files.write(place / "model.safetensors", safetensors.torch.save(weights, {"format": "pt"}))
    save_figure(reliability_figure({run.title: run.predictions()}), place / "reliability.png")
    files.write(place / "README.md", write_card(run, model, name, in_timm))


def write_card(run: Run, model: Model, name: str, in_timm: bool) -> str:
    """The model card: what it learned from, how good it is, its limits, how to use it."""
    log_probs, labels = run.predictions()
    few = len(labels) < FEW  # to measure calibration, as `fit` says too
    keys = [key for key in SHOWN if key in run.result.metrics and not (few and "ece" in key)]
    rows = {SHOWN[key]: run.result.metrics[key] for key in keys}
    values = [{"type": key, "value": round(item.value, 6)} for key, item in rows.items()]
    front: dict[str, Any] = {"library_name": "timm" if in_timm else "calmatch"}
    tags = ["calmatch", TASK, "semi-supervised-learning", "calibration"]
    front |= {"pipeline_tag": TASK, "tags": tags}
    result = {"task": {"type": TASK}, "metrics": values}
    result["dataset"] = {"name": run.data, "type": "own-pictures"}
    front["model-index"] = [{"name": name, "results": [result]}]
    words = {"run": run, "model": model, "name": name, "in_timm": in_timm, "rows": rows}
    words["notes"] = [note for note in run.result.notes if not LOCAL.search(note)]
    words |= {"few": few, "probs": probabilities(log_probs), "labels": labels}
    card = files.template(CARD).render(words, version=__version__)
    return f"---\n{yaml.safe_dump(front, allow_unicode=True, sort_keys=False)}---\n{card}"


def _write_timm_config(body: Any, model: Model, path: Path) -> None:
    """config.json of timm.create_model("hf-hub:..."): its logits, before our calibration."""
    settings = {"input_size": [3, model.size, model.size], "num_classes": len(model.classes)}
    settings |= {key: model.note[key] for key in ("mean", "std")}
    settings |= {"crop_pct": 1.0, "crop_mode": "squash" if model.squash else "center"}
    settings |= {"interpolation": "bicubic" if model.squash else "bilinear"}
    own = body.model.pretrained_cfg
    settings |= {key: own[key] for key in ("first_conv", "classifier") if own.get(key)}
    config = {"architecture": own["architecture"], "num_classes": len(model.classes)}
    config |= {"num_features": body.model.num_features, "label_names": list(model.classes)}
    if hasattr(body.model, "patch_embed"):
        config["model_args"] = {"img_size": model.size}
    files.write(path, json.dumps(config | {"pretrained_cfg": settings}, indent=2))


def _take_timm_names(path: Path) -> None:
    """A network that timm can load too has timm's names on the Hub, and ours here."""
    with contextlib.suppress(safetensors.SafetensorError):  # loading it will say what is wrong
        with safetensors.safe_open(files.regular(path), "pt") as file:
            names = list(file.keys())
            if not names or any("/" in name for name in names):
                return
            content = safetensors.torch.save({PREFIX + k: file.get_tensor(k) for k in names})
        files.write(path, content)  # and nothing maps it now, or Windows would refuse
