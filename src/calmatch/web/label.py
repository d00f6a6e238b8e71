"""`calmatch label`: pictures in the browser, one by one; every answer is saved at once."""

import csv
import hashlib
import io
import os
import secrets
import subprocess
import sys
import threading
import traceback
import unicodedata
import webbrowser
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from calmatch import console, files, ops, posthoc
from calmatch.data import folder
from calmatch.data import images as stored
from calmatch.fit import ask, portfolio
from calmatch.fit.features import compute_blocks
from calmatch.fit.plan import ONE, SEVERAL, choose_network
from calmatch.options import FitOptions, LabelOptions
from calmatch.predict import csv_writer
from calmatch.runs import load_examples
from calmatch.web import build_app, listen, need_server, page_routes, run

LIMIT = 1 << 18  # bytes of a request
SHOWN, SMALL, TINY = 1200, 256, 128  # pixels: of a picture, of one in a grid; below, no JPEG
GROUP, PAGE, AHEAD = 12, 60, 8  # pictures in a group, on a page of the list, chosen beforehand
LONGEST = 100  # characters of a class's name
OTHER = {"none": "none of these", "unsure": "cannot tell"}
# a command that ends with the process that holds the other end of its stdin, however that ends
WATCHED = """
import os, signal, sys, threading
gone = lambda: (os.read(0, 1), os.kill(os.getpid(), signal.SIGTERM))
threading.Thread(target=gone, daemon=True).start()
from calmatch.cli import main
sys.exit(main())
"""
REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; sandbox allow-scripts allow-downloads"
)
Answer = tuple[str, str]  # ("label", its class), ("none", "") or ("unsure", "")
Change = tuple[str, Answer | None, Answer | None]  # of a name: what it was, what it is to be


def label(options: LabelOptions) -> None:
    """Serve the page until it is interrupted; then say what was saved."""
    need_server()
    path = options.labels
    path = Path(os.path.realpath(path)) if path.is_symlink() else path  # else a file took its place
    names, skipped = folder.list_images(options.pictures)
    usable, odd = [name for name in names if _is_plain(name)], "a CSV cannot hold its name"
    skipped += [stored.Skipped(stored.valid_text(n), odd) for n in names if not _is_plain(n)]
    with _hold(path):
        answers = Answers(path, usable, _by_class_folder(usable))
        session = open_session(options, answers, usable, skipped)
        place, token = listen("127.0.0.1", options.port), secrets.token_urlsafe(16)
        app = build_app(routes(session), place, token=token, limit=LIMIT)
        address = f"http://127.0.0.1:{place.getsockname()[1]}/?token={token}"
        console.message("Ctrl-C ends it; nothing needs saving.", options.quiet)
        print(f"Label here: {address}", flush=True)
        if not options.no_browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            with suppress(KeyboardInterrupt):
                run(app, place)
        finally:
            session.close()
            print(answers.saved(), flush=True)


def _is_plain(name: str) -> bool:
    """Whether a name comes out of a CSV as it went in."""
    return name == name.strip() and name == stored.valid_text(name)


def _by_class_folder(names: Sequence[str]) -> dict[str, str]:
    """Labels as `fit` sees them, where a folder `unlabelled` says that the others are classes."""
    known = folder.class_folders(names)
    return known if len(known) < sum("/" in name for name in names) else {}


@contextmanager
def _hold(path: Path) -> Iterator[None]:
    """One server for one file of labels; the lock dies with the process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = files.open_lock(path.with_name(f".{path.name}.lock"))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}.") from error
    with file:
        if not files.try_lock(file):
            raise ValueError(f"Another `calmatch label` has {path} open: use its page, or end it.")
        yield


class Stale(Exception):
    """What is to be changed is no longer what it was: another tab was faster."""


class Answers:
    """What a person said of each picture, by name. Labels lie in one file, as `fit` reads it;
    "none of these" and "cannot tell" beside it in NAME.other.csv, so that `fit` takes no notice.
    A new file begins with the labels of class folders."""

    def __init__(self, path: Path, names: Sequence[str], begin: Mapping[str, str] = {}) -> None:
        self.path, self.other = path, path.with_name(f"{path.stem}.other.csv")
        self.lock, self.version = threading.RLock(), 0
        self.held: dict[str, Answer] = {}
        kinds = {text: kind for kind, text in OTHER.items()}
        for name, text in self._read(self.other, names).items():
            self.held[name] = (kinds.get(text, "unsure"), "")
        fresh = bool(begin) and not path.exists()
        for name, text in (begin if fresh else self._read(path, names)).items():
            self.held.pop(name, None)  # a kill between two files: the label came first or last
            self.held[name] = ("label", text)
        self.classes = dict.fromkeys(text for _, text in self.held.values() if text)  # in order
        self.log: list[list[tuple[str, Answer | None]]] = [[(name, None)] for name in self.held]
        self.written = {each: self._table(each) for each in (self.path, self.other)}
        if fresh:
            files.write(path, self.written[path])
            console.message(f"{path} begins with the {len(begin)} labels of class folders.")

    @staticmethod
    def _read(path: Path, names: Sequence[str]) -> dict[str, str]:
        if not path.exists():
            return {}
        lines = files.read_bytes(path).decode("utf-8-sig", "replace").splitlines()
        header = [cell.strip().lower() for cell in next(csv.reader(lines[:1]), [])]
        if header != ["file", "label"]:
            lost = "what else it holds would be lost. Choose another file with --labels."
            raise ValueError(f"{path} is not a CSV with the header file,label alone: {lost}")
        if not any(line.strip(" ,\t") for line in lines[1:]):
            return {}
        return folder.match_labels(folder.read_labels(path, names), names, path)

    def _table(self, path: Path) -> str:
        text = io.StringIO()
        write = csv_writer(text)
        write(["file", "label"])
        for name, (kind, own) in self.held.items():
            if (kind == "label") == (path == self.path):
                write([name, own or OTHER[kind]])
        return text.getvalue()

    def change(self, changes: Sequence[Change], log: bool = True) -> None:
        """All of them or none, on disk when this returns; Stale where one is not as it says."""
        with self.lock:
            if any(self.held.get(name) != before for name, before, _ in changes):
                raise Stale
            kept, new = self.held, {name: after for name, _, after in changes}
            self.held = {name: answer for name, answer in {**kept, **new}.items() if answer}
            labelled_first = any(after and after[0] == "label" for _, _, after in changes)
            try:
                for path in (self.path, self.other) if labelled_first else (self.other, self.path):
                    if (text := self._table(path)) != self.written[path] or not self.path.exists():
                        files.write(path, text)
                        self.written[path] = text
            except OSError:
                self.held = kept
                raise
            self.classes |= dict.fromkeys(after[1] for after in new.values() if after and after[1])
            if log:
                self.log.append([(name, before) for name, before, _ in changes])
            self.version += 1

    def undo(self, version: int) -> list[str]:
        """The last change back, and the names it was about."""
        with self.lock:
            if version != self.version:
                raise Stale
            if not self.log:
                return []
            self.change([(n, self.held.get(n), before) for n, before in self.log[-1]], log=False)
            return [name for name, _ in self.log.pop()]

    def counts(self) -> Counter[str]:
        return Counter(text for kind, text in self.held.values() if kind == "label")

    def saved(self) -> str:
        """What a person has at the end."""
        counts = self.counts()
        labels, classes = sum(counts.values()), len(counts)
        other = len(self.held) - labels
        also = f" {other} of no class are in {self.other}." if other else ""
        return f"Saved: {labels} labels of {classes} classes in {self.path}.{also}"


def open_session(
    options: LabelOptions, answers: Answers, names: Sequence[str], skipped: list[stored.Skipped]
) -> "Session":
    """Features of the pictures that may be asked for: a random sample of many, and labelled ones.

    All are in the order of a hash of their names: the same tomorrow, and as good as random.
    """
    order = sorted(names, key=lambda name: hashlib.blake2b(name.encode()).digest())
    first: list[str] = []
    if options.first is not None:
        if (examples := load_examples(options.first)) is None:
            raise ValueError(f"{options.first} is no run of `calmatch fit`.")
        first = [name for name in examples.asked_files if name in set(order)]
    free = [name for name in order if name not in answers.held][: ask.MOST]
    pool = {*list(answers.held)[-ask.MOST :], *first, *free}
    chosen = tuple(name for name in order if name in pool)
    device = ops.pick_device(options.device)
    net, _, notes = choose_network(FitOptions(options.pictures, net=options.net), device)
    net = ONE if net == SEVERAL and options.net is None else net  # the page shall begin soon
    console.message(notes, options.quiet)
    extractor = portfolio.load_extractor(net, None, device)
    listed = folder.ImageFolder(options.pictures, chosen, (-1,) * len(chosen), ())
    with console.ProgressBar("decoding", len(chosen), 0, options.quiet, unit="pictures") as bar:
        pixels, own = folder.decode_folder(listed, extractor.views.source, False, bar, squash=True)
    if len(own.names) < 3:
        raise ValueError(f"{options.pictures} holds {len(own.names)} pictures that can be decoded.")
    features = compute_blocks(extractor, pixels, options.quiet).some()
    spaces = portfolio.Embedding.fit(features).spaces(features)
    skipped += own.skipped
    return Session(options.pictures, own.names, answers, spaces, len(names), first, skipped)


class Session:
    """The pictures of a page, what is asked next, and a model that learns in the background."""

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        answers: Answers,
        spaces: Sequence[portfolio.Array],
        whole: int,
        first: Sequence[str] = (),
        skipped: Sequence[stored.Skipped] = (),
    ) -> None:
        self.root, self.names, self.answers, self.whole = root, names, answers, whole
        self.unreadable = skipped
        self.place = {name: row for row, name in enumerate(names)}
        self.teachers = portfolio.Teachers(spaces, 2)
        self.questions = ask.Questions(spaces, self.teachers.graph, np.arange(len(names)))
        self.first = [self.place[name] for name in first if name in self.place]
        self.put_off: dict[int, None] = {}
        self.queue: list[int] = []
        self.key = secrets.token_hex(4)  # a browser keeps pictures; another session has others
        self.model: tuple[ask.Learned, list[str], portfolio.Array] | None = None
        self.curve: dict[int, posthoc.Estimate] = {}
        self.learned = -1  # the version of the answers that the model knows
        self.fit: Fit | None = None
        self.wake, self.ended = threading.Event(), False
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        self.wake.set()

    def close(self) -> None:
        self.ended = True
        self.wake.set()
        if self.fit is not None:
            self.fit.process.terminate()

    def rows(self) -> dict[int, Answer]:
        """What has been answered, of the pictures here, the oldest first."""
        with self.answers.lock:
            held = self.answers.held.items()
            return {self.place[name]: answer for name, answer in held if name in self.place}

    def _work(self) -> None:
        """In a thread: after every change learn what is known by then."""
        for share in (0.25, 0.5, 0.75):  # an earlier session's curve
            self._learn(share)
        while not self.ended:
            self.wake.wait()
            self.wake.clear()
            if self.learned != self.answers.version and not self.ended:
                self._learn()

    def _learn(self, share: float = 1.0) -> None:
        version, rows = self.answers.version, self.rows()
        labelled = {row: text for row, (kind, text) in rows.items() if kind == "label"}
        labelled = dict(list(labelled.items())[: round(share * len(labelled))])
        classes = sorted(set(labelled.values()))
        try:
            if len(classes) > 1 and len(labelled) > len(classes):
                y = [classes.index(text) for text in labelled.values()]
                fair = self.questions.fair_rows([*rows, *self.put_off])
                learned = ask.learn(self.teachers, list(labelled), y, fair)
                self.curve[len(labelled)] = learned.error
                if share == 1.0:
                    probs = learned.probs(self.teachers.inputs)
                    self.model = (learned, classes, probs)
                    self.queue = self._choose(self.rows())
            elif share == 1.0:
                self.model = None
        except Exception:  # a fault of ours, which must not end the labelling
            console.warn(traceback.format_exc())
        if share == 1.0:
            self.learned = version

    def _choose(self, rows: dict[int, Answer]) -> list[int]:
        probs = None
        if self.model is not None:  # as uncalibrated as when it was proved
            own = self.model[0].weights
            probs = portfolio.softmax(self.teachers.inputs @ own[:-1] + own[-1])
        return list(self.questions.next({*rows, *self.put_off}, probs, AHEAD).rows.tolist())

    def question(self) -> int | None:
        """The next picture to ask for; those put off come last."""
        rows = self.rows()
        for _ in range(2):
            for row in (*self.first, *self.queue):
                if row not in rows and row not in self.put_off:
                    return row
            self.queue = self._choose(rows)
        return next((row for row in self.put_off if row not in rows), None)

    def act(self, what: str, body: Any) -> dict[str, Any]:
        """One change that a page asks for; the state after it."""
        changed: list[str] = []
        if what == "answer":
            changes = body.get("changes")
            if not isinstance(changes, list) or not 0 < len(changes) <= GROUP:
                raise ValueError(f"changes must be a list of 1 to {GROUP}.")
            self.answers.change([self._change(each) for each in changes])
        elif what == "undo":
            changed = self.answers.undo(body.get("version"))
        elif what == "class":
            with self.answers.lock:
                self.answers.classes.setdefault(clean_name(body.get("name")))
        elif what == "skip":
            row = self._row(body.get("row"))
            others = (k for k in self.put_off if k != row)  # a thread may be reading the old one
            self.put_off = dict.fromkeys([*others, row])
        elif what == "fit" and len(self.answers.counts()) > 1:
            if self.fit is None or self.fit.process.poll() is not None:
                self.fit = Fit(self.root, self.answers.path)
        else:
            raise ValueError("Label pictures of two classes first.")
        self.wake.set()
        undone = [self.show(self.place[name]) for name in changed if name in self.place]
        return self.state() | {"undone": undone}

    def _row(self, value: Any) -> int:
        if type(value) is not int or not 0 <= value < len(self.names):
            raise ValueError("There is no such picture.")
        return value

    def _change(self, each: Any) -> Change:
        if not isinstance(each, dict):
            raise ValueError("A change has row, before and after.")
        name = self.names[self._row(each.get("row"))]
        return name, read_answer(each.get("before")), read_answer(each.get("after"))

    def show(self, row: int) -> dict[str, Any]:
        """A picture as the page knows it."""
        name = self.names[row]
        return {"row": row, "name": name, "answer": self.answers.held.get(name)}

    def state(self) -> dict[str, Any]:
        with self.answers.lock:
            counts, row = self.answers.counts(), self.question()
            return {
                "key": self.key,
                "version": self.answers.version,
                "file": str(self.answers.path),
                "labels": sum(counts.values()),
                "answered": len(self.rows()),
                "pictures": len(self.names),
                "whole": self.whole,
                "undoable": len(self.answers.log),
                "classes": [{"name": k, "count": counts[k]} for k in self.answers.classes],
                "question": None if row is None else self.show(row),
                "ahead": [k for k in self.queue if k != row][:3],
                "busy": self.learned != self.answers.version,
                "model": self.describe(),
                "fit": self.fit and self.fit.describe(),
                "unreadable": [list(item) for item in self.unreadable[:20]],
                "unreadable_count": len(self.unreadable),
            }

    def describe(self) -> dict[str, Any] | None:
        """The model in numbers: error over labels, confidence against truth, every class."""
        if self.model is None:
            return None
        learned, classes, probs = self.model
        guess, confidence = probs.argmax(1), probs.max(1)
        free = np.ones(len(probs), bool)
        free[list(self.rows())] = False
        each = []
        for k, name in enumerate(classes):
            own = free & (guess == k)
            right = round(float(confidence[own].mean()), 3) if own.any() else None
            each.append({"name": name, "guessed": int(own.sum()), "right": right})
        top, right = learned.held.max(1), learned.held.argmax(1) == learned.truth
        return {
            "error": learned.error,
            "curve": [(count, *error) for count, error in sorted(self.curve.items())],
            "ten_more": posthoc.expected_gain(*learned.gain, 10 / len(classes)),
            "random": list(zip(top.tolist(), right.tolist(), strict=True)),
            "classes": each,
        }

    def guess(self, row: int) -> list[tuple[str, float]]:
        """The model's three likeliest classes of a picture, for a person who asks."""
        if self.model is None:
            return []
        _, classes, probs = self.model
        return [(classes[k], round(float(probs[row, k]), 3)) for k in np.argsort(-probs[row])[:3]]

    def group(self, row: int) -> list[dict[str, Any]]:
        """A picture and those like it that have no answer yet: near, and perhaps of its class."""
        alike = self.questions.kernel[row]
        if self.model is not None:
            alike = alike * (self.model[2] @ self.model[2][row])
        rows, order = self.rows(), np.argsort(-alike, kind="stable").tolist()
        near = [k for k in dict.fromkeys([row, *order]) if k not in rows]
        return [self.show(k) for k in near[:GROUP]]

    def labelled(self, start: int) -> list[dict[str, Any]]:
        """A page of what has been answered, the newest first."""
        return [self.show(row) for row in list(self.rows())[::-1][start : start + PAGE]]

    def picture(self, row: int, side: int) -> tuple[bytes, str]:
        """Encoded anew, with its type: what a browser gets is never a file of the folder."""
        data = files.read_bytes(self.root / self.names[row], stored.LARGEST_FILE)
        image, content = stored.preview(data, side), io.BytesIO()
        kind = "png" if max(image.size) <= TINY else "jpeg"
        image.save(content, kind, quality=90)
        return content.getvalue(), f"image/{kind}"


def clean_name(value: Any) -> str:
    """The name of a class as `fit` will read it."""
    if not isinstance(value, str):
        raise ValueError("A class has a name.")
    name = unicodedata.normalize("NFC", value).strip()
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        raise ValueError("A name holds no control characters.")
    if not 0 < len(name) <= LONGEST:
        raise ValueError(f"A name has 1 to {LONGEST} letters.")
    return name


def read_answer(value: Any) -> Answer | None:
    if value is None:
        return None
    match value:
        case ["label", name]:
            return "label", clean_name(name)
        case [("none" | "unsure") as kind, _]:
            return kind, ""
    raise ValueError("An answer is a label, none, unsure, or nothing.")


class Fit:
    """`calmatch fit` with these labels, in a process of its own."""

    def __init__(self, root: Path, labels: Path) -> None:
        home, here, number = root.resolve(), Path.cwd(), 1
        base = home.parent if here.is_relative_to(home) else here
        while (out := base / f"fit-{home.name}-{number}").exists():
            number += 1
        self.out, self.lines = out, deque[str](maxlen=200)
        words = ["fit", str(root), "--labels", str(labels), "--out", str(out)]
        command = [sys.executable, "-P", "-c", WATCHED, *words]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        pipes |= {"stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
        self.process: subprocess.Popen[str] = subprocess.Popen(command, **pipes)
        said = map(str.rstrip, self.process.stdout or ())  # as it is said, in the thread
        threading.Thread(target=self.lines.extend, args=(said,), daemon=True).start()

    def describe(self) -> dict[str, Any]:
        code = self.process.poll()
        ready = code == 0 and (self.out / "report.html").exists()
        return {"out": str(self.out), "lines": list(self.lines), "code": code, "report": ready}


def routes(session: Session) -> list[Any]:
    """The page, its pictures, and what it asks for."""
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    def see(request: Request) -> Response:
        views: dict[str, Any] = {"one": session.show, "guess": session.guess}
        views |= {"group": session.group, "labelled": session.labelled}
        views["state"] = lambda row: session.state()
        row, view = request.path_params["row"], views.get(request.path_params["what"])
        if view is None or not 0 <= row < len(session.names):
            return JSONResponse({"error": "There is no such picture."}, 404)
        return JSONResponse(view(row))

    def picture(request: Request) -> Response:
        row = request.path_params["row"]
        try:
            if not 0 <= row < len(session.names):
                raise ValueError("there is no such picture")
            side = SMALL if "small" in request.query_params else SHOWN
            content, kind = session.picture(row, side)
        except stored.BROKEN as error:
            return JSONResponse({"error": f"It cannot be shown: {files.reason(error)}."}, 404)
        kept = {"cache-control": "private, max-age=3600"}
        return Response(content, media_type=kind, headers=kept)

    def report(request: Request) -> Response:
        if session.fit is None or not session.fit.describe()["report"]:
            return JSONResponse({"error": "There is no report yet."}, 404)
        content = files.read_bytes(session.fit.out / "report.html")
        policy = {"content-security-policy": REPORT_POLICY}
        return Response(content, media_type="text/html; charset=utf-8", headers=policy)

    async def change(request: Request) -> Response:
        what = request.path_params["what"]
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError("The request must be one JSON object.")
            return JSONResponse(await run_in_threadpool(session.act, what, body))
        except Stale:
            why = "Another tab has changed this; what you see now is what is saved."
            return JSONResponse({"error": why, **session.state()}, 409)
        except (ValueError, RecursionError) as error:
            why = str(error) if type(error) is ValueError else "The request is not JSON."
            return JSONResponse({"error": why}, 400)
        except OSError as error:
            why = f"{session.answers.path} cannot be written: {files.reason(error)}."
            return JSONResponse({"error": why}, 507)

    return [
        *page_routes("label"),
        Route("/picture/{row:int}", picture),
        Route("/see/{what:str}/{row:int}", see),
        Route("/report", report),
        Route("/do/{what:str}", change, methods=["POST"]),
    ]
