"""Prediction spread over a Ray cluster: chunks of file names out, rows back in order."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch

from calmatch import log
from calmatch.model import Model
from calmatch.predict import Pictures, Skipped, answered, decoded
from calmatch.table import Row

BLOCKS = 1000  # pieces of work that Ray keeps track of


class _Worker:
    """One process on one node: it holds the model and turns chunks of names into rows."""

    def __init__(self, model: Any, source: Pictures) -> None:
        import ray

        torch.set_num_threads(1)  # Ray starts one worker for each core
        self.model: Model = ray.get(model)
        self.model.to("cuda" if ray.get_gpu_ids() else "cpu")
        self.source = source
        self.node = ray.get_runtime_context().get_node_id()

    def __call__(self, item: dict[str, Any]) -> dict[str, str]:
        names = json.loads(item["names"])
        root, size = self.source.root, self.model.size
        found = answered(self.model, names, [decoded(root, name, size) for name in names])
        rows = [[isinstance(row, Row), *row] for row in found]
        return {"node": self.node, "rows": json.dumps(rows)}


def rows(
    model: Model, source: Pictures, batch: int, address: str | None, quiet: bool
) -> Iterator[Row | Skipped]:
    """The rows that `predict.local` gives, in the same order, computed by Ray Data.

    Every node must have calmatch installed and see the pictures under the same path. File names,
    not pictures, pass through the machine that asks.
    """
    ray = _imported()
    mine = not ray.is_initialized()
    if mine:
        _reachable(address)
        try:
            start(ray, address, logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ValueError(f"There is no Ray cluster at {address}: {error}.") from error
    try:
        yield from _spread(ray, model, source, batch, quiet)
    finally:
        if mine:
            ray.shutdown()


def start(ray: Any, address: str | None, level: Any) -> None:
    """Join a cluster, or start one that only this machine can reach, without a dashboard."""
    own = {} if address else {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(address=address, log_to_driver=False, logging_level=level, **own)


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it warns of its own design
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ValueError("--engine ray needs an extra: pip install 'calmatch[ray]'.") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


def _reachable(address: str | None) -> None:
    """Ray itself takes minutes to find that nobody answers."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return  # "auto" and "ray://..." are Ray's own business
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"There is no Ray cluster at {address}: {error}.") from error


def _spread(
    ray: Any, model: Model, source: Pictures, batch: int, quiet: bool
) -> Iterator[Row | Skipped]:
    chunks = []
    for chunk in source.chunks(batch):
        yield from (name for name in chunk if isinstance(name, Skipped))
        if names := [name for name in chunk if isinstance(name, str)]:
            chunks.append({"names": json.dumps(names)})
    if not chunks:
        return
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    there = ray.cluster_resources()
    gpus = int(there.get("GPU", 0))
    most = max(1, min(len(chunks), gpus or int(there.get("CPU", 1))))
    held = ray.put(model.to("cpu"))
    work = ray.data.from_items(chunks, override_num_blocks=min(len(chunks), BLOCKS)).map(
        _Worker,
        fn_constructor_args=(held, Pictures(source.path.absolute())),
        compute=ray.data.ActorPoolStrategy(min_size=most, max_size=most),
        num_cpus=1,
        num_gpus=1 if gpus else 0,
    )
    nodes = set()
    for item in work.iter_rows():
        nodes.add(item["node"])
        for good, *cells in json.loads(item["rows"]):
            yield _row(*cells) if good else Skipped(*cells)
    log.tell(f"Nodes that took part: {len(nodes)}.", quiet)


def _row(file: str, label: str, confidence: float, names: list[str], sure: bool) -> Row:
    return Row(file, label, confidence, tuple(names), sure)
