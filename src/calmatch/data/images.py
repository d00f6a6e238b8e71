"""Image files decoded, resized and kept in a cache on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import mmap
import os
import struct
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
Pixels = NDArray[np.uint8]
T = TypeVar("T")
BROKEN = (  # what Pillow's readers raise at a damaged file
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    TypeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


@dataclass(frozen=True)
class ImageFiles:
    """Pictures that are decoded when asked for; `names` are below `root`, a folder or a zip."""

    root: Path
    names: tuple[str, ...]
    size: int

    def __len__(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (len(self), 3, self.size, self.size)

    def data(self, place: int) -> bytes:
        if self.root.suffix == ".zip":
            return _open_zip(self.root, os.getpid()).read(self.names[place])
        return (self.root / self.names[place]).read_bytes()

    def picture(self, place: int) -> Pixels:
        """uint8 [3, size, size]; a ValueError names a file that cannot be decoded."""
        try:
            return decode(self.data(place), self.size)
        except BROKEN as error:
            why = str(error).strip().rstrip(".") or type(error).__name__
            raise ValueError(f"{self.names[place]} cannot be decoded: {why}.") from error

    def take(self, rows: Sequence[int]) -> Tensor:
        if not rows:
            return torch.zeros(0, *self.shape[1:], dtype=torch.uint8)
        return torch.from_numpy(np.stack([self.picture(row) for row in rows]))

    def some(self, rows: Sequence[int]) -> ImageFiles:
        return ImageFiles(self.root, tuple(self.names[row] for row in rows), self.size)


@dataclass(frozen=True)
class CachedImages:
    """Rows of decoded pictures in a file of the cache: read when asked for, never held."""

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


def take_images(images: Images, rows: Tensor) -> Tensor:
    """Some pictures as one tensor."""
    if isinstance(images, ImageFiles):
        return images.take(rows.tolist())
    return images.take(rows) if isinstance(images, CachedImages) else images[rows]


@functools.lru_cache(maxsize=4)
def _open_zip(path: Path, process: int) -> zipfile.ZipFile:
    """An open zip; a forked process must not share its parent's file position."""
    return zipfile.ZipFile(path)


def open_image(data: bytes) -> Image.Image:
    """A picture whose pixels are not read yet; one large enough to be a bomb is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            return Image.open(io.BytesIO(data))
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise ValueError("it is too large") from error


def decode(data: bytes, size: int) -> Pixels:
    """A square RGB picture: turned upright, shorter side resized, centre cut out.

    Pictures large enough to be bombs are refused, 16-bit grey is scaled, what is transparent turns
    white, and of several frames the first counts. Large JPEGs are decoded at a reduced size.
    """
    picture = open_image(data)
    picture.draft("RGB", (3 * size, 3 * size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # damaged metadata does not spoil a picture
        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I") or picture.mode == "F":
        picture = _eight_bits(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return square_image(picture.convert("RGB"), size)


def square_image(picture: Image.Image, size: int) -> Pixels:
    """The middle of an RGB picture whose shorter side is made `size` pixels."""
    picture = _not_too_long(picture)
    scale = size / min(picture.size)
    if scale != 1:
        wide, high = (max(size, round(side * scale)) for side in picture.size)
        picture = picture.resize((wide, high), Image.Resampling.BILINEAR)
    left, top_row = (picture.width - size) // 2, (picture.height - size) // 2
    picture = picture.crop((left, top_row, left + size, top_row + size))
    return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1))


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Grey of 16 or more bits, scaled to eight."""
    values = np.nan_to_num(np.asarray(picture, dtype=np.float64))
    wide = picture.mode.startswith("I;16") or values.max() > 255
    top = 65535.0 if wide else 1.0 if picture.mode == "F" and values.max() <= 1 else 255.0
    return Image.fromarray((values * (255 / top)).clip(0, 255).astype(np.uint8))


def _not_too_long(picture: Image.Image) -> Image.Image:
    """The middle of a strip, so that resizing its short side does not make it gigantic."""
    longest = 4 * min(picture.size)
    if max(picture.size) <= longest:
        return picture
    wide, high = (min(side, longest) for side in picture.size)
    left, top = (picture.width - wide) // 2, (picture.height - high) // 2
    return picture.crop((left, top, left + wide, top + high))


def list_class_folders(root: Path, below: str = "") -> dict[str, list[str]]:
    """Names of the pictures of each class folder, both sorted: the field's file order."""
    if root.suffix == ".zip":
        names = [name for name in _open_zip(root, os.getpid()).namelist() if name.startswith(below)]
    else:
        start = root / below
        names = [
            path.relative_to(root).as_posix()
            for folder in sorted(start.iterdir())
            if folder.is_dir()
            for path in folder.iterdir()
        ]
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(SUFFIXES):
            found.setdefault(Path(name).parent.name, []).append(name)
    return found


def map_threads(act: Callable[[int], T], number: int, ahead: int = 512) -> Iterator[T]:
    """act(0), act(1), ... by threads, never many ahead of the one who asks."""
    with ThreadPoolExecutor() as pool:
        for start in range(0, number, ahead):
            yield from pool.map(act, range(start, min(start + ahead, number)))


def digest_files(files: ImageFiles) -> str:
    """A key of the contents, names and size."""
    total = hashlib.blake2b(digest_size=16)
    total.update(f"v1 {files.size}".encode())
    if files.root.suffix == ".zip":  # the archive's own bytes say it all
        with files.root.open("rb") as archive:
            total.update(hashlib.file_digest(archive, "blake2b").digest())
        total.update("\n".join(files.names).encode())
        return total.hexdigest()
    for name, data in zip(files.names, map_threads(files.data, len(files)), strict=True):
        total.update(f"\n{name} {len(data)} ".encode() + hashlib.blake2b(data).digest())
    return total.hexdigest()


def stamp_files(files: ImageFiles) -> str:
    """A key of names, sizes and times of change: quick, for folders too large to be read twice."""
    total = hashlib.blake2b(f"v1 {files.root.resolve()} {files.size}".encode(), digest_size=16)
    for name in files.names:
        facts = (files.root / name).stat()
        total.update(f"\n{name} {facts.st_size} {facts.st_mtime_ns}".encode())
    return total.hexdigest()


def load_cached(files: ImageFiles, title: str) -> Tensor:
    """All pictures, decoded once and kept in the cache."""

    def fill(pictures: Pixels) -> None:
        for place, picture in enumerate(map_threads(files.picture, len(files))):
            pictures[place] = picture

    return cached_tensor(f"{title}-{digest_files(files)}", files.shape, fill)


KEPT_SECONDS = 30 * 24 * 3600  # seconds that an array stays after its last use


def cache_folder() -> Path:
    """CALMATCH_CACHE, or calmatch's folder in the user's cache."""
    chosen = os.environ.get("CALMATCH_CACHE")
    path = Path(chosen) if chosen else Path.home() / ".cache" / "calmatch"
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_note(path: Path, content: Any) -> None:
    """Write JSON beside an array, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    draft.write_text(json.dumps(content), "utf-8")
    draft.replace(path)


@dataclass(frozen=True)
class MappedArray:
    """An array in a file. What was looked at is let go at once: the system's own cache keeps it."""

    tensor: Tensor
    pages: mmap.mmap

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, *rows: Tensor) -> Tensor:
        """Some of it, as `tensor[rows]`."""
        found = self.tensor[rows]
        self.pages.madvise(mmap.MADV_DONTNEED)
        return found


def release_pages(array: NDArray[Any]) -> None:
    """Let go of the pages of an array that is being filled; what they hold is in the file."""
    if isinstance(array, np.memmap):
        array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def cached_tensor(
    key: str, shape: tuple[int, ...], fill: Callable[[NDArray[Any]], None], dtype: Any = np.uint8
) -> Tensor:
    """The array of this key, filled on first use."""
    return cached_array(key, shape, fill, dtype).tensor


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
        _sweep()
        draft = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            made = np.lib.format.open_memmap(draft, mode="w+", dtype=dtype, shape=shape)
            fill(made)
            made.flush()
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    if found.shape != shape or found.dtype != dtype:
        raise ValueError(f"{path} is not what it should be; delete it.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only: nobody writes to it
        return MappedArray(torch.from_numpy(found), found._mmap)


def _sweep() -> None:
    """Remove arrays that nobody used for long, their notes, and what interrupted builds left."""
    for path in cache_folder().iterdir():
        with contextlib.suppress(OSError):  # another process was faster, or it is not ours
            old = (
                path.suffix in (".npy", ".part")
                and time.time() - path.stat().st_mtime > KEPT_SECONDS
            )
            if old:
                path.unlink()
                path.with_suffix(".json").unlink(missing_ok=True)
