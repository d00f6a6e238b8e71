"""`calmatch serve`: a model over HTTP, its requests in batches, and a page to drop an image on."""

import asyncio
import ipaddress
import os
import secrets
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import torch

from calmatch import __version__, console, files, load, nets, ops
from calmatch.data.images import DECODED, decode, open_image
from calmatch.model import Model
from calmatch.options import ServeOptions
from calmatch.web import HERE, LOOPBACK, build_app, listen, need_server, page_routes, run

PATIENCE = 30.0  # seconds that a request may take to arrive
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # buckets of the time that an answer took
Reply = tuple[int, dict[str, Any]]  # an HTTP status, and what is sent as JSON


def serve(options: ServeOptions) -> None:
    """Answer until SIGINT or SIGTERM; requests that have come are answered first."""
    need_server()
    largest = min(options.megabytes, options.megapixels)
    if options.batch < 0 or options.workers < 0 or not 0 < largest < float("inf"):
        raise ValueError("--batch and --workers are at least 0, --megabytes and --megapixels more.")
    model = load(options.run, device=str(ops.pick_device(options.device)), trust=options.trust)
    place, near = listen(options.host, options.port), options.host == "localhost"
    with suppress(ValueError):
        near = ipaddress.ip_address(options.host).is_loopback
    # whoever knows the token may ask by any name that the machine has
    token = None if near else os.environ.get("CALMATCH_TOKEN") or secrets.token_urlsafe(16)
    service = Service(model, options)
    names: Any = {"hosts": LOOPBACK if near else None, "lifespan": service.lifespan}
    app = build_app(service.routes(), place, token=token, limit=service.limit, **names)
    host = socket.gethostname() if options.host in ("0.0.0.0", "::") else options.host
    address = f"http://{f'[{host}]' if ':' in host else host}:{place.getsockname()[1]}/"
    header = f"-H 'Authorization: Bearer {token}' " if token else ""
    print(f"Serving {service.version}: {address}{f'?token={token}' if token else ''}", flush=True)
    line = f"One picture: curl {header}--data-binary @PICTURE {address}predict"
    console.message(line, options.quiet)
    run(app, place)


class Service:
    """A model, the pictures that wait for it, and what came of those before."""

    def __init__(self, model: Model, options: ServeOptions) -> None:
        self.model, self.version = model, model.version
        self.batch = options.batch or nets.batch_size(model.device)
        self.pixels, self.limit = options.megapixels * 1e6, int(options.megabytes * 1e6)
        self.workers = options.workers or min(torch.get_num_threads(), 8)
        self.waiting: deque[tuple[bytes, Future[Reply]]] = deque()
        self.held = 0  # bytes of requests that have no answer yet
        self.statuses: Counter[int] = Counter()
        self.slots, self.seconds = [0] * len(SECONDS), 0.0
        self.sure, self.confidence = 0, 0.0
        self.batches, self.lock = 0, threading.Lock()

    def routes(self) -> list[Any]:
        from starlette.responses import JSONResponse, PlainTextResponse
        from starlette.routing import Route

        async def predict(request: Any) -> Any:
            began = time.monotonic()
            status, body = await self.answer(request)
            self._count(status, body, time.monotonic() - began)
            return JSONResponse(body, status, {"retry-after": "1"} if status == 503 else None)

        about = files.read_json(HERE / "openapi.json")
        about["info"]["version"] = __version__
        limits = f" At most {self.limit:,} bytes and {self.pixels:,.0f} pixels."
        about["paths"]["/predict"]["post"]["description"] += limits
        return [
            *page_routes("serve"),
            Route("/predict", predict, methods=["POST"]),
            Route("/openapi.json", lambda _: JSONResponse(about)),
            Route("/health", lambda _: JSONResponse(self.health())),
            Route("/metrics", lambda _: PlainTextResponse(self.metrics())),
        ]

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        """The threads, for as long as the server runs."""
        before = torch.get_num_threads()
        share = max(1, before // self.workers)  # as `predict` divides a CPU
        size = (1, 3, self.model.size, self.model.size)
        self.model.probabilities(torch.zeros(size, dtype=torch.uint8))  # the first takes longest
        with ThreadPoolExecutor(self.workers, "", torch.set_num_threads, (share,)) as self.pool:
            yield
        torch.set_num_threads(before)

    async def answer(self, request: Any) -> Reply:
        """Status and JSON for one request."""
        from starlette.requests import ClientDisconnect

        if request.headers.get("content-type", "").startswith("multipart/"):
            return 415, {"error": "Send the picture itself, not a form: curl --data-binary @FILE."}
        length = int(request.headers.get("content-length", self.limit))  # the guard looked at it
        if self.held and self.held + length > DECODED:
            return 503, {"error": "Too many pictures are waiting; try again in a moment."}
        self.held += length
        try:
            data = await asyncio.wait_for(request.body(), PATIENCE)
            future: Future[Reply] = Future()
            self.waiting.append((data, future))
            self.pool.submit(self._work)  # it may find that another has taken this one along
            return await asyncio.wrap_future(future)
        except TimeoutError:
            return 408, {"error": f"The picture took more than {PATIENCE:.0f} s to arrive."}
        except ClientDisconnect:
            return 499, {"error": "The client went away."}
        finally:
            self.held -= length

    def _work(self) -> None:
        """In a thread: decode and answer this thread's share of those who wait."""
        some = []
        with suppress(IndexError):  # another was faster
            for _ in range(min(self.batch, -(-len(self.waiting) // self.workers))):
                some.append(self.waiting.popleft())
        try:
            decoded = [self._decode(data) for data, _ in some]
            good = [pixels for pixels in decoded if isinstance(pixels, np.ndarray)]
            answers = iter(self._answers(np.stack(good)) if good else [])
            replies = [next(answers) if isinstance(one, np.ndarray) else one for one in decoded]
            for (_, future), reply in zip(some, replies, strict=True):
                future.set_result(reply)
        except Exception:  # a fault of ours, which must not end the server
            console.warn(traceback.format_exc())
            for _, future in some:
                future.set_result((500, {"error": "A fault of calmatch; its console has it."}))

    def _decode(self, data: bytes) -> Any:
        """uint8 [3, size, size], or the reply that says why not."""
        try:
            wide, high = open_image(data).size
            if wide * high > self.pixels:
                most = f"It has {wide:,} x {high:,} pixels; at most {self.pixels:,.0f} are read."
                return 413, {"error": most}
            return decode(data, self.model.size, self.model.squash)
        except Exception as error:  # whatever a decoder makes of a broken or hostile file
            why = "it is no picture" if not data else files.reason(error)
            return 422, {"error": f"The picture cannot be decoded: {why}."}

    def _answers(self, pixels: Any) -> list[Reply]:
        probs = self.model.probabilities(torch.from_numpy(pixels))
        answers, replies = self.model.answer(probs), []
        for answer, row in zip(answers, probs.tolist(), strict=True):
            chances = sorted(zip(self.model.classes, row, strict=True), key=lambda pair: -pair[1])
            probabilities = {name: round(chance, 6) for name, chance in chances}
            body = {**answer._asdict(), "confidence": round(answer.confidence, 6)}
            replies.append((200, {**body, "probabilities": probabilities, "model": self.version}))
        with self.lock:
            self.batches += 1
        return replies

    def _count(self, status: int, body: dict[str, Any], seconds: float) -> None:
        self.statuses[status] += 1
        self.sure += body.get("sure", False)
        self.confidence += body.get("confidence", 0.0)
        self.seconds += seconds
        for slot, most in enumerate(SECONDS):
            self.slots[slot] += seconds <= most

    def health(self) -> dict[str, Any]:
        """That it answers, and what the page says of the model."""
        sets, point = self.model.conformal, self.model.selective
        return {
            "status": "ok",
            "model": self.version,
            "classes": len(self.model.classes),
            "covered": point is not None and point.threshold is not None,
            "promise": point.describe() if point else "",
            "coverage": sets.coverage if sets and sets.threshold is not None else None,
        }

    def metrics(self) -> str:
        """Counters in Prometheus' text format; a mean confidence that sinks says: new pictures."""
        total = sum(self.statuses.values())
        slots = zip([*map(str, SECONDS), "+Inf"], [*self.slots, total], strict=True)
        numbers = {"statuses": sorted(self.statuses.items()), "slots": slots, "total": total}
        return str(files.template(HERE / "metrics.txt").render(numbers, service=self))
