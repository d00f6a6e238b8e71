"""`calmatch serve` under 32 clients against `calmatch predict`, on the same photographs.

    python benchmarks/serve.py [--pictures 256] [--rounds 3]

Both use every core and the network that `fit` takes, with a random last layer. The two take turns,
so that a busy machine slows both; the clients' own work counts against the server. Exit code 1
where the server has less than 0.8 of predict's throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from calmatch import nets
from calmatch.model import load_model, write_model
from calmatch.predict import predict

NET, SIZE = "efficientnet_lite0(pretrained=False)", 224
LEAST = 0.8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pictures", type=int, default=256)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        write_random_model(home)
        pictures = write_photographs(home / "pictures", options.pictures)
        model = load_model(home)
        predict(model, home / "pictures", home / "warm.csv", quiet=True)
        command = [sys.executable, "-m", "calmatch", "serve", home, "--port", "0", "--quiet"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline().rstrip("/\n").rpartition(":")[2])
            asyncio.run(ask_all(port, pictures[: options.clients], options.clients))
            ratios = []
            for number in range(options.rounds):
                began = time.perf_counter()
                predict(model, home / "pictures", home / "out.csv", quiet=True)
                alone = len(pictures) / (time.perf_counter() - began)
                began = time.perf_counter()
                asyncio.run(ask_all(port, pictures, options.clients))
                served = len(pictures) / (time.perf_counter() - began)
                ratios.append(served / alone)
                print(
                    f"round {number}: predict {alone:6.1f} pictures/s, serve with "
                    f"{options.clients} clients {served:6.1f}, ratio {ratios[-1]:.2f}",
                    flush=True,
                )
            server.terminate()
    ratio = statistics.median(ratios)
    print(f"median ratio {ratio:.2f} (wanted: {LEAST})")
    return 0 if ratio >= LEAST else 1


def write_random_model(folder: Path) -> None:
    torch.manual_seed(0)
    body = nets.build(NET, 10, SIZE)
    write_model(
        folder,
        nets.Net(body, {}),
        net=NET,
        method="supervised",
        classes=[f"class {k}" for k in range(10)],
        size=SIZE,
        mean=[0.5] * 3,
        std=[0.5] * 3,
        versions={},
        squash=True,
    )


def write_photographs(folder: Path, number: int) -> list[bytes]:
    """JPEGs of 640 x 480 that take as long to decode as photographs do; a hundred, then again."""
    folder.mkdir()
    pictures: list[bytes] = []
    for k in range(min(number, 100)):
        draw = np.random.default_rng(k)
        rough = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        pixels = np.asarray(rough.resize((640, 480), Image.Resampling.BICUBIC), dtype=np.int16)
        noise = draw.normal(0, 6, pixels.shape).astype(np.int16)
        data = io.BytesIO()
        Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(
            data, "jpeg", quality=90
        )
        pictures.append(data.getvalue())
    pictures = [pictures[k % 100] for k in range(number)]
    for k, each in enumerate(pictures):
        (folder / f"{k:05d}.jpg").write_bytes(each)
    return pictures


async def ask_all(port: int, pictures: list[bytes], clients: int) -> None:
    """Each client has one connection and sends its next picture when it has an answer."""
    left = iter(pictures)

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for data in left:
            head = (
                f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(data)}"
            )
            writer.write(head.encode() + b"\r\n\r\n" + data)
            reply = await reader.readuntil(b"\r\n\r\n")
            assert reply.startswith(b"HTTP/1.1 200"), reply
            length = int(reply.lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))


if __name__ == "__main__":
    sys.exit(main())
