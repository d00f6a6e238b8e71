"""Labels from other programs, recognised by content; predictions that other programs read."""

from __future__ import annotations

import csv
import json
import unicodedata
from pathlib import Path

import pytest
from PIL import Image

from calmatch.data.folder import own_images, read_folder
from calmatch.model import Model, load_model
from calmatch.predict import predict
from conftest import write_random_model

NAMES = ["a.png", "b 1.png", "deep/c.png", "deep/d%20.png", "other/d.png", "z/d.png"]


@pytest.fixture
def folder(tmp_path) -> Path:
    for number, name in enumerate(NAMES):
        path = tmp_path / "pics" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (40 * number, 90, 0)).save(path)
    return tmp_path / "pics"


def task(image: str, *labels: str, **more: object) -> dict:
    choice = {"type": "choices", "from_name": "kind", "value": {"choices": list(labels)}}
    annotations = [{"result": [choice], "was_cancelled": False, **more}] if labels else []
    return {"id": 7, "data": {"image": image}, "annotations": annotations, "predictions": []}


TASKS = [
    task("/data/local-files/?d=pics/a.png", "cat"),
    task("/data/upload/3/0a1b2c3d-b%201.png", "dog"),
    task("s3://bucket/pics/deep/c.png", "cat"),
    task("https://host/x/pics/deep/d%2520.png", "dog"),
    task("/data/upload/3/other/d.png"),
]
SMALL = [
    {"id": 1, "image": "/data/upload/1/pics/a.png", "choice": "cat", "annotator": 1},
    {"id": 2, "image": "/data/upload/1/0a1b2c3d-b%201.png", "choice": "dog"},
    {"id": 3, "image": "/data/upload/1/c.png", "choice": {"choices": ["cat"]}},
    {"id": 4, "image": "/data/local-files/?d=x/deep/d%2520.png", "choice": "dog"},
]
COCO = {
    "images": [{"id": n, "file_name": name, "width": 12} for n, name in enumerate(NAMES)],
    "categories": [{"id": 5, "name": "cat"}, {"id": 9, "name": "dog"}],
    "annotations": [
        {"image_id": n, "category_id": 9 if n % 2 else 5, "bbox": [0, 0, 1, 1]} for n in range(4)
    ],
}
LINES = [{"file_name": name, "label": ["cat", "dog"][n % 2]} for n, name in enumerate(NAMES[:4])]
METADATA = "file_name,text,label\n" + "".join(
    f"{line['file_name']},words,{line['label']}\n" for line in LINES
)
FILES = {
    "label-studio.json": json.dumps(TASKS, indent=1),
    "label-studio-min.json": json.dumps(SMALL),
    "coco.json": json.dumps(COCO),
    "metadata.jsonl": "\n".join(map(json.dumps, LINES)),
    "metadata.csv": METADATA,
}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_accents_of_either_form_name_the_same_picture(tmp_path, form):
    (tmp_path / "p").mkdir()
    for name in ("é1.png", "é2.png"):
        path = tmp_path / "p" / unicodedata.normalize(form, name)
        Image.new("RGB", (12, 12)).save(path)
    tasks = [task("/data/upload/1/é1.png", "a"), task("s3://bucket/p/é2.png", "b")]
    (tmp_path / "labels.json").write_text(json.dumps(tasks), "utf-8")
    assert read_folder(tmp_path / "p", tmp_path / "labels.json").labels == (0, 1)


@pytest.mark.parametrize("name", FILES)
def test_each_format_is_known_by_its_content_and_says_the_same(folder, name):
    path = folder.parent / "labels.txt"  # the name does not say it
    path.write_text(FILES[name], "utf-8")
    listing = read_folder(folder, path)
    assert listing.classes == ("cat", "dog")
    assert dict(zip(listing.names, listing.labels, strict=True)) == {
        **dict(zip(NAMES, (0, 1, 0, 1), strict=False)),
        **dict.fromkeys(NAMES[4:], -1),
    }
    assert len(own_images(root=str(folder), labels=str(path), size=12).labels) == len(NAMES)


MISTAKES = [
    ([*TASKS, task("x/new.png", "cat")], "row 6: x/new.png"),
    ([*TASKS, task("no/d.png", "cat")], "row 6: no/d.png"),  # two are called so
    ([*TASKS, task("a.png", "dog")], "rows 1 and 6: a.png is called 'cat' and 'dog'"),
    (
        [{**TASKS[0], "annotations": [*TASKS[0]["annotations"], *TASKS[1]["annotations"]]}],
        "json, row 1: .*a.png is called 'cat' and 'dog'",  # by two annotators
    ),
    ([*TASKS, task("a.png", "dog", "cat")], "row 6: a.png has several classes, 'dog', 'cat'"),
    ([*TASKS, {"data": {"text": "hello"}}], "row 6: expected a picture and its choice"),
    ([*TASKS, {"data": {"image": "a.png"}, "annotations": [{}]}], "row 6: expected a picture"),
    ([*TASKS, 5], "row 6: expected a picture"),
    ([*TASKS, {"image": "../q.png", "choice": 3}], "row 6: ../q.png lies outside"),
    ([task("a.png")], "has no labels"),
    ({"tasks": TASKS}, "neither a list of tasks"),
    (COCO | {"images": 3}, "not a COCO-style file"),
    ({"categories": [], "images": []}, "not a COCO-style file: 'annotations'"),
    (COCO | {"annotations": [{"image_id": 0, "category_id": 4}]}, "row 1 of its annotations.*4"),
    (COCO | {"annotations": [{"image_id": 77, "category_id": 5}]}, "row 1 of its annotations.*77"),
]


@pytest.mark.parametrize(("content", "sentence"), MISTAKES)
def test_a_mistake_is_named_by_its_row(folder, content, sentence):
    path = folder.parent / "labels.json"
    path.write_text(json.dumps(content), "utf-8")
    with pytest.raises(ValueError, match=sentence):
        read_folder(folder, path)


def test_cancelled_annotations_do_not_count(folder):
    path = folder.parent / "labels.json"
    path.write_text(json.dumps([*TASKS, task("a.png", "dog", was_cancelled=True)]), "utf-8")
    assert read_folder(folder, path).counts == (2, 2)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "run").mkdir()
    write_random_model(tmp_path / "run", "tiny", 3, 12)
    return load_model(tmp_path / "run")


def test_label_studio_gets_the_least_confident_first_and_its_labels_come_back(folder, model):
    out = folder.parent / "tasks.json"
    predict(model, folder, out, format="label-studio", quiet=True)
    tasks = json.loads(out.read_text("utf-8"))
    scores = [each["predictions"][0]["score"] for each in tasks]
    assert scores == sorted(scores)
    assert len(tasks) == len(NAMES)
    assert {each["predictions"][0]["model_version"] for each in tasks} == {model.version}
    assert "/data/local-files/?d=pics/b%201.png" in {each["data"]["image"] for each in tasks}
    for number, each in enumerate(tasks):  # a person says yes or no to each
        result = each["predictions"][0]["result"]
        each["annotations"] = [{"result": [result[0] | {"value": {"choices": [f"{number % 2}"]}}]}]
    out.write_text(json.dumps(tasks), "utf-8")
    assert read_folder(folder, out).counts == (3, 3)


def test_local_file_addresses_begin_where_label_studio_says(folder, model, monkeypatch):
    out = folder.parent / "tasks.json"
    monkeypatch.setenv("LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT", str(folder.parent.parent))
    predict(model, folder, out, format="label-studio", quiet=True)
    assert f"?d={folder.parent.name}/pics/a.png" in out.read_text("utf-8")
    monkeypatch.setenv("LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT", str(folder / "deep"))
    with pytest.raises(ValueError, match="is not below LABEL_STUDIO_LOCAL"):
        predict(model, folder, folder.parent / "other.json", format="label-studio", quiet=True)
    assert not (folder.parent / "other.json").exists()


def test_fiftyone_and_camera_trap_tables_say_what_the_csv_says(folder, model):
    place = folder.parent
    predict(model, folder, place / "plain.csv", quiet=True)
    predict(model, folder, place / "labels.json", format="fiftyone", quiet=True)
    predict(model, folder, place / "observations.csv", format="camera-trap", quiet=True)
    with (place / "plain.csv").open(newline="") as file:
        plain = {row["file"]: row for row in csv.DictReader(file)}
    labels = json.loads((place / "labels.json").read_text("utf-8"))["labels"]
    with (place / "observations.csv").open(newline="") as file:
        seen = {row["mediaID"]: row for row in csv.DictReader(file)}
    assert set(seen) == set(plain) == set(NAMES)
    assert set(labels) == {name.removesuffix(".png") for name in NAMES}
    for name, row in plain.items():
        entry, observation = labels[name.removesuffix(".png")], seen[name]
        assert entry["label"] == observation["scientificName"] == row["label"]
        assert f"{entry['confidence']:.6f}" == row["confidence"]
        assert observation["classificationProbability"] == row["confidence"]
        assert observation["classificationMethod"] == "machine"
    assert seen["deep/c.png"]["deploymentID"] == "deep"


def test_pictures_that_fiftyone_cannot_tell_apart_are_a_sentence(folder, model, monkeypatch):
    (folder / "a.jpg").write_bytes((folder / "a.png").read_bytes())
    monkeypatch.setattr(Model, "probabilities", None)  # found before anything is predicted
    with pytest.raises(ValueError, match="Two pictures are called a"):
        predict(model, folder, folder.parent / "labels.json", format="fiftyone", quiet=True)
    assert not (folder.parent / "labels.json").exists()


def test_a_format_wants_its_ending_and_json_wants_a_format(folder, model, typed):
    done = typed("predict", folder.parent / "run", folder, "-o", folder.parent / "x.json")
    assert (done.returncode, "--format label-studio" in done.stderr) == (2, True)
    with pytest.raises(ValueError, match=r"must end in \.json"):
        predict(model, folder, folder.parent / "x.csv", format="fiftyone", quiet=True)
