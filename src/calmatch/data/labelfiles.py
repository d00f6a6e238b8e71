"""Other programs' files: labels from Label Studio, COCO and imagefolder; predictions for them."""

import csv
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from calmatch.data.images import SUFFIXES

WRONG = (TypeError, AttributeError, ValueError, LookupError)  # what odd entries raise
HOME_VARIABLE = "LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT"  # where its addresses begin
# classes of camera traps that are no species, and what Camtrap DP calls them
NO_SPECIES = {"blank": "blank", "empty": "blank", "human": "human", "person": "human"}
NO_SPECIES |= {"vehicle": "vehicle", "unknown": "unknown", "unclassified": "unclassified"}
OBSERVATION = (  # Camtrap DP's columns of what a model can know
    "observationID deploymentID mediaID eventStart eventEnd observationLevel observationType "
    "scientificName classificationMethod classifiedBy classificationTimestamp "
    "classificationProbability observationTags"
)


class LabelRow(NamedTuple):
    """An image's name and label, and the row in which they stand."""

    file: str
    label: str
    number: int


def read_label_json(text: str, path: Path, names: Iterable[str]) -> list[LabelRow]:
    """The labels of Label Studio's tasks, of a COCO-style file, or of a metadata.jsonl.

    Such files hold addresses of another machine: the end of one that is a name in the folder
    counts, or else its last part where only one image is called so.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        try:  # one mapping in each line
            content = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            raise ValueError(f"{path} is not a JSON file: {error}.") from error
    if isinstance(content, dict) and "categories" in content:
        entries = _coco_labels(content, path)
    elif isinstance(content, list):
        entries = _task_labels(content, path)
    else:
        raise ValueError(
            f"{path} is JSON, but neither a list of tasks, as Label Studio writes, nor images, "
            f"annotations and categories, as COCO-style files have."
        )
    find = _find_by_end(names)
    rows = []
    for number, file, label in entries:
        if not isinstance(label, str | int | float):
            raise ValueError(f"{path}, row {number}: {label!r:.40} is no name of a class.")
        if name := unicodedata.normalize("NFC", str(label)).strip():  # as in a table, "" is none
            rows.append(LabelRow(find(str(file)), name, number))
    if not rows:
        raise ValueError(f"{path} has no labels: nothing in it is annotated with one class.")
    return rows


def _task_labels(tasks: list[Any], path: Path) -> Iterator[tuple[int, str, Any]]:
    """Of Label Studio's JSON or JSON-MIN, or of lines with `file_name` and `label`."""
    for number, task in enumerate(tasks, 1):
        try:
            file = _find_address(task.get("data", task))
            chosen = list(_find_choices(task))
        except WRONG as error:
            need = "a picture and its choice, as Label Studio exports them, or file_name and label"
            raise ValueError(f"{path}, row {number}: expected {need}.") from error
        for choices in chosen:
            if len(choices) > 1:
                more = ", ".join(map(repr, choices[:3]))
                raise ValueError(f"{path}, row {number}: {file} has several classes, {more}.")
            yield from ((number, file, label) for label in choices)


def _find_choices(task: dict[str, Any]) -> Iterator[list[Any]]:
    """The classes that each annotation names."""
    if "data" not in task:
        value = task[next((key for key in ("choice", "labels") if key in task), "label")]
        value = value["choices"] if isinstance(value, dict) else value
        yield value if isinstance(value, list) else [] if value in (None, "") else [value]
        return
    for annotation in task.get("annotations", task.get("completions", ())):
        results = [] if annotation.get("was_cancelled") else annotation["result"]
        values = [each["value"]["choices"] for each in results if each["type"] == "choices"]
        yield [label for choices in values for label in choices]


def _find_address(data: dict[str, Any]) -> str:
    """The path in the first value that is one of an image; a web address is taken apart."""
    for text in data.values():
        if not isinstance(text, str):
            continue
        if "://" in text or text.startswith("/data/"):
            parts = urlsplit(text)
            local = parse_qs(parts.query).get("d")
            text = local[0] if local else unquote(parts.path)
        if text.lower().endswith(SUFFIXES):
            return text.lstrip("/")
    raise KeyError("image")


def _coco_labels(content: dict[str, Any], path: Path) -> Iterator[tuple[int, str, str]]:
    """Of annotations that give an image a category; boxes and masks of it are ignored."""
    try:
        classes = {each["id"]: each["name"] for each in content["categories"]}
        images = {each["id"]: each["file_name"] for each in content["images"]}
        annotations = list(content["annotations"])
        if len(classes) < len(content["categories"]) or len(images) < len(content["images"]):
            raise ValueError("an id stands there twice")
    except WRONG as error:
        raise ValueError(f"{path} is not a COCO-style file: {error}.") from error
    for number, each in enumerate(annotations, 1):
        try:
            yield number, images[each["image_id"]], classes[each["category_id"]]
        except WRONG as error:
            why = f"it has no image or no category, {error}"
            raise ValueError(f"{path}, row {number} of its annotations: {why}.") from error


def _find_by_end(names: Iterable[str]) -> Callable[[str], str]:
    known = {unicodedata.normalize("NFC", name) for name in names}  # as `match_labels` knows them
    deepest = max((plain.count("/") for plain in known), default=0) + 1
    last: dict[str, list[str]] = {}
    for plain in known:
        last.setdefault(plain.rpartition("/")[2], []).append(plain)

    def find(file: str) -> str:
        parts = unicodedata.normalize("NFC", str(file)).replace("\\", "/").split("/")
        for start in range(max(0, len(parts) - deepest), len(parts)):
            if (end := "/".join(parts[start:])) in known:
                return end
        upload = re.sub(r"^[0-9a-f]{8}-", "", parts[-1])  # as Label Studio names what it was sent
        alike = last.get(parts[-1]) or last.get(upload) or []
        return alike[0] if len(alike) == 1 else file

    return find


WriteRow = Callable[[Any], None]  # takes an answer: file, label, confidence, set, sure


@contextmanager
def _write_label_studio(path: Path, root: Path, version: str) -> Iterator[WriteRow]:
    """Tasks with predictions for import, the least confident first: their labels teach most."""
    rows: list[Any] = []
    yield rows.append
    root = root.resolve()
    home = Path(os.environ.get(HOME_VARIABLE) or root.parent).resolve()
    if not root.is_relative_to(home):
        raise ValueError(f"{root} is not below {HOME_VARIABLE}, {home}.")
    place = PurePosixPath(root.relative_to(home).as_posix())
    tasks = []
    for row in sorted(rows, key=lambda row: float(row.confidence)):
        choice: dict[str, Any] = {"from_name": "choice", "to_name": "image", "type": "choices"}
        choice["value"] = {"choices": [row.label]}
        guess = {"model_version": version, "score": round(row.confidence, 6), "result": [choice]}
        address = "/data/local-files/?d=" + quote(os.fsencode(place / row.file))
        data = {"image": address, "set": list(row.set), "sure": row.sure}
        tasks.append(json.dumps({"data": data, "predictions": [guess]}))
    path.write_text("[\n" + ",\n".join(tasks) + "\n]\n", "utf-8")


@contextmanager
def _write_fiftyone(path: Path, root: Path, version: str) -> Iterator[WriteRow]:
    """labels.json of a FiftyOneImageClassificationDataset whose data_path is the folder."""
    labels: dict[str, Any] = {}

    def write(row: Any) -> None:
        extra = {"set": list(row.set), "sure": row.sure, "model_version": version}
        entry = {"label": row.label, "confidence": row.confidence, "attributes": extra}
        labels[row.file.rpartition(".")[0]] = entry

    yield write
    path.write_text(json.dumps({"labels": labels}, indent=0), "utf-8")


@contextmanager
def _write_camera_trap(path: Path, root: Path, version: str) -> Iterator[WriteRow]:
    """observations.csv of a Camtrap DP; the times of events are in its media table."""
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(OBSERVATION.split())

        def write(row: Any) -> None:
            kind = NO_SPECIES.get(row.label.casefold(), "animal")
            deployment = row.file.partition("/")[0] if "/" in row.file else ""
            cells = [f"{version}:{row.file}", deployment, row.file, "", "", "media", kind]
            cells += [row.label if kind == "animal" else "", "machine", version, now]
            table.writerow([*cells, f"{row.confidence:.6f}", "sure" if row.sure else "not sure"])

        yield write


# what `predict --format` writes, and how the file's name must end
FORMATS: dict[str, tuple[str, Callable[[Path, Path, str], AbstractContextManager[WriteRow]]]] = {
    "label-studio": (".json", _write_label_studio),
    "fiftyone": (".json", _write_fiftyone),
    "camera-trap": (".csv", _write_camera_trap),
}
