"""Image files decoded, resized and kept in a cache on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import mmap
import os
import struct
import time
import warnings
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from calmatch.files import draft

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
KEPT_SECONDS = 30 * 24 * 3600  # that an array stays after its last use
Pixels = NDArray[np.uint8]
T = TypeVar("T")
X = TypeVar("X")
Y = TypeVar("Y")
BROKEN: tuple[type[Exception], ...] = (  # what Pillow's readers raise at a damaged file
    *(OSError, ValueError, SyntaxError, EOFError, ArithmeticError, AttributeError, LookupError),
    *(MemoryError, NotImplementedError, TypeError, struct.error, zlib.error),
    Image.DecompressionBombError,
)


@dataclass(frozen=True)
class ImageFiles:
    """Images that are decoded when asked for; `names` are below `root`, a folder or a zip."""

    root: Path
    names: tuple[str, ...]
    size: int
    squash: bool = False  # the whole image made square; else its middle

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (len(self), 3, self.size, self.size)

    def data(self, place: int) -> bytes:
        if self.root.suffix == ".zip":
            return _open_zip(self.root, os.getpid()).read(self.names[place])
        return (self.root / self.names[place]).read_bytes()

    def image(self, place: int) -> Pixels:
        """uint8 [3, size, size]; a ValueError names a file that cannot be decoded."""
        try:
            return decode(self.data(place), self.size, self.squash)
        except BROKEN as error:
            why = str(error).strip().rstrip(".") or type(error).__name__
            raise ValueError(f"{self.names[place]} cannot be decoded: {why}.") from error

    def take(self, rows: Sequence[int]) -> Tensor:
        if not rows:
            return torch.zeros(0, *self.shape[1:], dtype=torch.uint8)
        return torch.from_numpy(np.stack([self.image(row) for row in rows]))

    def some(self, rows: Sequence[int]) -> ImageFiles:
        names = tuple(self.names[row] for row in rows)
        return ImageFiles(self.root, names, self.size, self.squash)


@dataclass(frozen=True)
class CachedImages:
    """Rows of decoded images in a file of the cache: read when asked for, never held."""

    file: MappedArray  # uint8 [M, 3, H, W]
    rows: Tensor  # [N]
    key: str  # of the file, which says what it holds

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.file.tensor.shape[1:])

    def take(self, rows: Sequence[int] | Tensor) -> Tensor:
        return self.file.take(self.rows[rows])

    def some(self, rows: Sequence[int] | Tensor) -> CachedImages:
        return CachedImages(self.file, self.rows[rows], self.key)


Images = Tensor | ImageFiles | CachedImages


class Skipped(NamedTuple):
    """A file that is left out, and why."""

    file: str
    reason: str


def take_images(images: Images, rows: Tensor) -> Tensor:
    """Some images as one tensor."""
    if isinstance(images, ImageFiles):
        return images.take(rows.tolist())
    return images.take(rows) if isinstance(images, CachedImages) else images[rows]


@functools.lru_cache(maxsize=4)
def _open_zip(path: Path, process: int) -> zipfile.ZipFile:
    """An open zip; a forked process must not share its parent's file position."""
    return zipfile.ZipFile(path)


def decode(data: bytes, size: int, squash: bool = False) -> Pixels:
    """A square RGB image: turned upright, shorter side resized, centre cut out; or squashed.

    Images large enough to be bombs are refused, 16-bit grey is scaled, what is transparent turns
    white, and of several frames the first counts. Large JPEGs are decoded at a reduced size.
    """
    image = open_image(data)
    image.draft("RGB", (3 * size, 3 * size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # damaged metadata does not spoil an image
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        image = _eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return square_image(image.convert("RGB"), size, squash)


def open_image(data: bytes) -> Image.Image:
    """An image whose pixels are not read yet; one large enough to be a bomb is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            return Image.open(io.BytesIO(data))
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise ValueError("it is too large") from error


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 or more bits, scaled to eight."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64))
    wide = image.mode.startswith("I;16") or values.max() > 255
    top = 65535.0 if wide else 1.0 if image.mode == "F" and values.max() <= 1 else 255.0
    return Image.fromarray((values * (255 / top)).clip(0, 255).astype(np.uint8))


def square_image(image: Image.Image, size: int, squash: bool = False) -> Pixels:
    """The middle of an RGB image whose shorter side is made `size` pixels, or all of it."""
    if squash:
        image = image.resize((size, size), Image.Resampling.BICUBIC)
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
    longest = 4 * min(image.size)  # the ends of a strip go first, or resizing made it gigantic
    if max(image.size) > longest:
        image = _crop_centre(image, min(image.width, longest), min(image.height, longest))
    scale = size / min(image.size)
    if scale != 1:
        wide, high = (max(size, round(side * scale)) for side in image.size)
        image = image.resize((wide, high), Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(_crop_centre(image, size, size)).transpose(2, 0, 1))


def _crop_centre(image: Image.Image, wide: int, high: int) -> Image.Image:
    left, top = (image.width - wide) // 2, (image.height - high) // 2
    return image.crop((left, top, left + wide, top + high))


def list_class_folders(root: Path, below: str = "") -> dict[str, list[str]]:
    """Names of the images of each class folder, both sorted: the field's file order."""
    if root.suffix == ".zip":
        names = [name for name in _open_zip(root, os.getpid()).namelist() if name.startswith(below)]
    else:
        folders = [folder for folder in (root / below).iterdir() if folder.is_dir()]
        paths = [path for folder in folders for path in folder.iterdir()]
        names = [path.relative_to(root).as_posix() for path in paths]
    classes: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(SUFFIXES):
            classes.setdefault(Path(name).parent.name, []).append(name)
    return classes


def map_threads(act: Callable[[int], T], number: int, ahead: int = 512) -> Iterator[T]:
    """act(0), act(1), ... by threads, never many ahead of the one who asks."""
    with ThreadPoolExecutor() as pool:
        for start in range(0, number, ahead):
            yield from pool.map(act, range(start, min(start + ahead, number)))


def compute_ordered(
    items: Iterable[X],
    read: Callable[[X], Y],
    compute: Callable[[Y], T],
    device: torch.device,
    workers: int = 0,
) -> Iterator[T]:
    """compute(read(item)) for each item, in order: `read` decodes a batch, `compute` is a network.

    On a CPU each of some threads does both for a batch of its own, with its share of the cores, so
    that none ever waits for another; for a GPU they read ahead while this one computes. `workers`
    are the threads; 0: one for each core.
    """
    before, alone = torch.get_num_threads(), device.type == "cpu"
    number = workers or (min(before, 8) if alone else _count_cores())
    share = max(1, before // number)  # of a CPU; OMP_NUM_THREADS is obeyed

    def work(item: X) -> Any:
        return compute(read(item)) if alone else read(item)

    def results() -> Iterator[Any]:
        ahead: deque[Future[Any]] = deque()
        try:
            for item in items:
                ahead.append(pool.submit(work, item))
                if len(ahead) > 2 * number:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:  # also where the one who asks has had enough
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)  # of threads that start from now on

    pool = ThreadPoolExecutor(number, initializer=torch.set_num_threads, initargs=(share,))
    yield from results() if alone else map(compute, results())


def _count_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def stamp_files(files: ImageFiles) -> str:
    """A key of names, sizes and times of change: quick, for folders too large to be read twice."""
    total = hashlib.blake2b(
        os.fsencode(f"v1 {files.root.resolve()} {files.size} {files.squash}"), digest_size=16
    )
    for name in files.names:
        facts = (files.root / name).stat()
        total.update(os.fsencode(f"\n{name} {facts.st_size} {facts.st_mtime_ns}"))
    return total.hexdigest()


def load_cached(files: ImageFiles, title: str) -> Tensor:
    """All images, decoded once and kept in the cache."""

    def fill(images: Pixels) -> None:
        for place, image in enumerate(map_threads(files.image, len(files))):
            images[place] = image

    return cached_array(f"{title}-{_digest_files(files)}", files.shape, fill).tensor


def _digest_files(files: ImageFiles) -> str:
    """A key of the contents, names and size."""
    total = hashlib.blake2b(digest_size=16)
    total.update(f"v1 {files.size}".encode())
    if files.root.suffix == ".zip":  # the archive's own bytes say it all
        with files.root.open("rb") as archive:
            total.update(hashlib.file_digest(archive, "blake2b").digest())
        total.update(os.fsencode("\n".join(files.names)))
        return total.hexdigest()
    for name, data in zip(files.names, map_threads(files.data, len(files)), strict=True):
        total.update(os.fsencode(f"\n{name} {len(data)} ") + hashlib.blake2b(data).digest())
    return total.hexdigest()


def cache_folder() -> Path:
    """CALMATCH_CACHE, or calmatch's folder in the user's cache."""
    chosen = os.environ.get("CALMATCH_CACHE")
    path = Path(chosen) if chosen else Path.home() / ".cache" / "calmatch"
    path.mkdir(parents=True, exist_ok=True)
    return path


@dataclass(frozen=True)
class MappedArray:
    """An array in a file. What was looked at is let go at once: the system's own cache keeps it."""

    tensor: Tensor
    pages: mmap.mmap
    path: Path

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, *rows: Tensor) -> Tensor:
        """Some of it, as `tensor[rows]`."""
        values = self.tensor[rows]
        release_pages(self.pages)
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        # a worker that was not forked opens it anew
        return open_array, (self.path, tuple(self.tensor.shape), self.tensor.numpy().dtype)


def release_pages(pages: mmap.mmap) -> None:
    """Let go of what is in the file too, where the system (not Windows) can be told."""
    if hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


def cached_array(
    key: str, shape: tuple[int, ...], fill: Callable[[NDArray[Any]], None], dtype: Any = np.uint8
) -> MappedArray:
    """The array of this key, filled on first use.

    It is written under another name and renamed when whole, so an interrupted build is never
    mistaken for a finished one, and two processes that build the same array do not clash.
    """
    path = cache_folder() / f"{key}.npy"
    if path.exists():
        with contextlib.suppress(OSError):  # another's cache, which we may only read
            os.utime(path)
    else:
        _remove_unused()
        with draft(path) as part:
            target = np.lib.format.open_memmap(part, mode="w+", dtype=dtype, shape=shape)
            fill(target)
            target.flush()
            del target  # Windows renames no file that is mapped
    return open_array(path, shape, dtype)


def open_array(path: Path, shape: tuple[int, ...], dtype: Any) -> MappedArray:
    """An array of the cache from its file, read only."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{path} is not what it should be; delete it.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only: nobody writes to it
        return MappedArray(torch.from_numpy(array), array._mmap, path)


def _remove_unused() -> None:
    """Remove arrays that nobody used for long, their notes, and what interrupted builds left."""
    for path in cache_folder().iterdir():
        with contextlib.suppress(OSError):  # another process was faster, or it is not ours
            age = time.time() - path.stat().st_mtime
            if path.suffix in (".npy", ".part") and age > KEPT_SECONDS:
                path.unlink()
                path.with_suffix(".json").unlink(missing_ok=True)
