"""Image files decoded, resized and kept in a cache on disk."""

import contextlib
import errno
import functools
import hashlib
import io
import mmap
import os
import re
import stat
import struct
import sys
import threading
import time
import warnings
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from calmatch import files, ops

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# The only decoders: Pillow's others start programs (PostScript) or are there for rare files.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
LARGEST_FILE = 1 << 28  # bytes of one file; larger ones are not images
DECODED = 1 << 30  # bytes of files, and of pixels, that all threads may hold at once
PIXEL, PIXEL_OF = 11, {"WEBP": 16}  # bytes that decoding takes for each pixel, copies included
STRIP = 1 << 20  # pixels that are converted at once
KEPT_SECONDS = 30 * 24 * 3600  # that an array stays after its last use
MARKER = "CACHEDIR.TAG"  # of a folder that may be deleted: https://bford.info/cachedir/
SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55\n# Decoded images of calmatch.\n"
OWN_NAME = re.compile(r"\.?[a-z0-9]+-[0-9a-f-]+\.(npy|json)(\.\d+\.part)?")
# Damaged metadata spoils nothing, and of bombs we speak. Once: what a thread sets, others restore.
for kind in (UserWarning, Image.DecompressionBombWarning):
    warnings.filterwarnings("ignore", "", kind, r"PIL\.")
# Pieces so large that the system takes them back: of small ones every thread would keep its own.
Image.core.set_block_size(1 << 26)  # type: ignore[attr-defined]
Pixels = NDArray[np.uint8]
T = TypeVar("T")
X = TypeVar("X")
Y = TypeVar("Y")
BROKEN: tuple[type[Exception], ...] = (  # what Pillow's readers raise at a damaged file
    *(OSError, ValueError, SyntaxError, EOFError, ArithmeticError, AttributeError, LookupError),
    *(MemoryError, NotImplementedError, TypeError, RuntimeError, struct.error, zlib.error),
    *(Image.DecompressionBombError, zipfile.BadZipFile),
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
        if not is_zip(self.root):
            return files.read_bytes(self.root / self.names[place], LARGEST_FILE)
        archive = _open_zip(self.root, os.getpid())
        member = archive.getinfo(self.names[place])
        files.check_member(member)
        if why := too_large(member.file_size):
            raise ValueError(why)
        with archive.open(member) as file:  # no more than it says, whatever it unpacks to
            return file.read(member.file_size)

    def image(self, place: int) -> Pixels:
        """uint8 [3, size, size]; a ValueError names a file that cannot be decoded."""
        name = self.names[place]
        try:
            archive = _open_zip(self.root, os.getpid()) if is_zip(self.root) else None
            size = archive.getinfo(name).file_size if archive else (self.root / name).stat().st_size
            with _file_room.hold(size):
                return decode(self.data(place), self.size, self.squash)
        except BROKEN as error:
            raise ValueError(f"{name} cannot be decoded: {files.reason(error)}.") from error

    def take(self, rows: Sequence[int]) -> Tensor:
        if not rows:
            return torch.zeros(0, *self.shape[1:], dtype=torch.uint8)
        return torch.from_numpy(np.stack([self.image(row) for row in rows]))

    def some(self, rows: Sequence[int]) -> "ImageFiles":
        return replace(self, names=tuple(self.names[row] for row in rows))


@dataclass(frozen=True)
class CachedImages:
    """Rows of decoded images in a file of the cache: read when asked for, never held."""

    file: "MappedArray"  # uint8 [M, 3, H, W]
    rows: Tensor  # [N]
    key: str  # of the file, which says what it holds

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.file.tensor.shape[1:])

    def take(self, rows: Sequence[int] | Tensor) -> Tensor:
        return self.file.take(self.rows[rows])

    def some(self, rows: Sequence[int] | Tensor) -> "CachedImages":
        return replace(self, rows=self.rows[rows])


Images = Tensor | ImageFiles | CachedImages


class Skipped(NamedTuple):
    """A file that is left out, and why."""

    file: str
    reason: str


def take_images(images: Images, rows: Tensor) -> Tensor:
    """Some images as one tensor."""
    return images[rows] if isinstance(images, Tensor) else images.take(rows.tolist())


def is_zip(path: Path) -> bool:
    """Whether a path is an archive: a folder may be called so too."""
    return path.suffix.lower() == ".zip" and not path.is_dir()


@functools.lru_cache(maxsize=4)
def _open_zip(path: Path, process: int) -> zipfile.ZipFile:
    """An open zip; a forked process must not share its parent's file position."""
    return zipfile.ZipFile(files.regular(path))


class _Room:
    """So many bytes for all threads together: who finds too few waits."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.free, self.changed = DECODED, threading.Condition()

    @contextlib.contextmanager
    def hold(self, number: int) -> Iterator[None]:
        number = min(number, DECODED)  # one that is larger than all of it is alone
        with self.changed:
            self.changed.wait_for(lambda: self.free >= number)
            self.free -= number
        try:
            yield
        finally:
            with self.changed:
                self.free += number
                self.changed.notify_all()


_file_room, _pixel_room = _Room(), _Room()  # always entered in this order
if hasattr(os, "register_at_fork"):  # the threads that hold them are not in a forked process
    os.register_at_fork(after_in_child=_file_room.clear)
    os.register_at_fork(after_in_child=_pixel_room.clear)


def decode(data: bytes, size: int, squash: bool = False) -> Pixels:
    """A square RGB image: turned upright, shorter side resized, centre cut out; or squashed.

    Images large enough to be bombs are refused, 16-bit grey is scaled, what is transparent turns
    white, and of several frames the first counts. Large JPEGs are decoded at a reduced size.
    """
    image: Any = open_image(data)
    room = _decoded_bytes(image)
    image.draft("RGB", (3 * size, 3 * size))
    if image.format == "JPEG" and data.find(b"\xff\xda", image.fp.tell()) < 0:
        room = _decoded_bytes(image)  # of a file of several scans, libjpeg holds all the same
    with _pixel_room.hold(room):
        ImageOps.exif_transpose(image, in_place=True)
        return square_image(plain_colours(image), size, squash)


def preview(data: bytes, side: int) -> Image.Image:
    """An image for a person: upright, in plain colours, no side longer than so many pixels."""
    image = open_image(data)
    image.draft("RGB", (side, side))
    with _pixel_room.hold(PIXEL * image.width * image.height):
        ImageOps.exif_transpose(image, in_place=True)
        plain = plain_colours(image)
        plain.thumbnail((side, side))
        return plain


def open_image(data: bytes, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    """An image whose pixels are not read yet; one large enough to be a bomb is refused.

    The one call of Pillow's reader: without a list of formats it would start Ghostscript for a
    PostScript file, whatever its name ends in.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise ValueError("it is too large") from error
    except UnidentifiedImageError as error:  # which would name an object in memory
        raise OSError(f"cannot identify it as {', '.join(formats)}") from error
    if _decoded_bytes(image) > DECODED:  # Pillow's own limit is anybody's to change
        raise ValueError("it is too large")
    return image


def _decoded_bytes(image: Image.Image) -> int:
    return PIXEL_OF.get(image.format or "", PIXEL) * image.width * image.height


def plain_colours(image: Image.Image) -> Image.Image:
    """RGB of eight bits without transparency, made strip by strip where the image is large."""
    top = _find_white(image) if image.mode.startswith("I") or image.mode == "F" else 0.0
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.width * image.height <= STRIP:
        return _flatten(image, top)
    whole = Image.new("RGB", image.size)
    for start, part in _strips(image):
        whole.paste(_flatten(part, top), (0, start))
    return whole


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Parts of an image with the row where each begins."""
    high = max(1, STRIP // image.width)
    for start in range(0, image.height, high):
        yield start, image.crop((0, start, image.width, min(start + high, image.height)))


def _find_white(image: Image.Image) -> float:
    """The value of white in grey of 16 or more bits."""
    highest = max(float(np.nan_to_num(np.asarray(part)).max()) for _, part in _strips(image))
    if image.mode.startswith("I;16") or highest > 255:
        return 65535.0
    return 1.0 if image.mode == "F" and highest <= 1 else 255.0


def _flatten(image: Image.Image, top: float) -> Image.Image:
    if top:
        values = np.nan_to_num(np.asarray(image, dtype=np.float64))
        image = Image.fromarray((values * (255 / top)).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def square_image(image: Image.Image, size: int, squash: bool = False) -> Pixels:
    """The middle of an RGB image whose shorter side is made `size` pixels, or all of it."""
    if squash:
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    else:
        longest = 4 * min(image.size)  # the ends of a strip go first, or resizing made it gigantic
        if max(image.size) > longest:
            image = _crop_centre(image, min(image.width, longest), min(image.height, longest))
        scale = size / min(image.size)
        wide, high = (max(size, round(side * scale)) for side in image.size)
        image = image.resize((wide, high), Image.Resampling.BILINEAR)  # a copy if of that size
        image = _crop_centre(image, size, size)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def _crop_centre(image: Image.Image, wide: int, high: int) -> Image.Image:
    left, top = (image.width - wide) // 2, (image.height - high) // 2
    return image.crop((left, top, left + wide, top + high))


def list_class_folders(root: Path, below: str = "") -> dict[str, list[str]]:
    """Names of the images of each class folder, both sorted: the field's file order."""
    if is_zip(root):
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


def walk_images(root: Path) -> Iterator[str | Skipped]:
    """Names of images below a folder, in order; hidden ones and links to folders are left out."""
    inside, waiting = root.resolve(), [""]  # folders end in a slash; a stack, as deep as they are
    while waiting:
        name = waiting.pop()
        path = root / name
        if name and not name.endswith("/"):
            if path.is_symlink() and path.is_dir():
                yield Skipped(name, "a link to a folder is not followed")
            elif name.lower().endswith(SUFFIXES):
                reason = unfit_reason(path, inside)
                yield Skipped(name, reason) if reason else name
            continue
        try:
            with os.scandir(path) as listing:
                names = [item.name + "/" * item.is_dir(follow_symlinks=False) for item in listing]
        except OSError as error:
            if not name:
                raise ValueError(f"{root} cannot be opened: {error.strerror}.") from error
            yield Skipped(name, f"it cannot be opened ({error.strerror})")
            continue
        shown = (below for below in names if not below.startswith((".", "__MACOSX")))
        waiting += sorted((name + below for below in shown), reverse=True)


def unfit_reason(path: Path, inside: Path) -> str:
    """Why a file among images must not be opened, empty if it may; `inside` is their folder."""
    try:
        if path.is_symlink() and not path.resolve(strict=True).is_relative_to(inside):
            return "it is a link that leaves the folder"
        facts = path.stat()
    except (OSError, RuntimeError) as error:  # it leads nowhere, or to itself
        return f"it cannot be opened ({files.reason(error)})"
    return too_large(facts.st_size) if stat.S_ISREG(facts.st_mode) else "it is not a regular file"


def too_large(size: int) -> str:
    """Why a file of so many bytes is not read, empty if it is."""
    return f"it is larger than {LARGEST_FILE >> 20} MiB" if size > LARGEST_FILE else ""


def valid_text(name: str) -> str:
    """A file name as valid Unicode; bytes that are none show as \\xff."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


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

    On a CPU each of `workers` threads (0: one a core) does both for a batch of its own, with its
    share of the cores, so that none waits for another; for a GPU they read ahead while it computes.
    """
    before, alone = torch.get_num_threads(), device.type == "cpu"
    number = workers or (min(before, 8) if alone else ops.count_cores())
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

    if not alone:
        sys.setswitchinterval(2e-4)  # for good: or they and who starts kernels wait 5 ms a turn
    pool = ThreadPoolExecutor(number, initializer=torch.set_num_threads, initargs=(share,))
    yield from results() if alone else map(compute, results())


def stamp_files(listed: ImageFiles) -> str:
    """A key of names, sizes and times of change: quick, for folders too large to be read twice."""
    start = f"v1 {listed.root.resolve()} {listed.size} {listed.squash}"
    total, zipped = hashlib.blake2b(os.fsencode(start), digest_size=16), is_zip(listed.root)
    for name in listed.names:
        try:  # number and time of its inode: files that changed places may agree in all else
            facts = (listed.root if zipped else listed.root / name).stat()
            marks = (facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_ctime_ns)
        except OSError:  # it has vanished since it was listed
            marks = (-1, 0, 0, 0)
        total.update(os.fsencode(f"\n{name} {marks}"))
    return total.hexdigest()


def load_cached(listed: ImageFiles, title: str) -> Tensor:
    """All images, decoded once and kept in the cache."""

    def fill(images: Pixels) -> None:
        for place, image in enumerate(map_threads(listed.image, len(listed))):
            images[place] = image

    return cached_array(f"{title}-{stamp_files(listed)}", listed.shape, fill).tensor


def cache_root() -> Path:
    """CALMATCH_CACHE, or calmatch's folder in the user's cache."""
    try:
        return Path(os.environ.get("CALMATCH_CACHE") or "~/.cache/calmatch").expanduser()
    except RuntimeError as error:  # a user without a home, as in a container
        raise ValueError("Nobody knows your home folder; set CALMATCH_CACHE or HOME.") from error


def cache_folder() -> Path:
    """Where arrays are kept: a folder of our own, which a marker says may be deleted."""
    path = cache_root() / "arrays"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not (path / MARKER).exists() and not any(path.iterdir()):
            files.write(path / MARKER, SIGNATURE)
    except OSError as error:
        why = f"{files.reason(error)}; set CALMATCH_CACHE"
        raise ValueError(f"The cache {path} cannot be used: {why}.") from error
    return path


@dataclass(frozen=True)
class MappedArray:
    """An array in a file. What was looked at is let go at once: the system's own cache keeps it."""

    tensor: Tensor
    pages: mmap.mmap
    path: Path

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
    """The array of this key, filled on first use; no other process ever sees half of it."""
    if (array := find_array(key, shape, dtype)) is not None:
        return array
    path = cache_folder() / f"{key}.npy"
    _remove_unused(path.parent)
    with files.draft(path) as part:
        target = np.lib.format.open_memmap(part, mode="w+", dtype=dtype, shape=shape)
        _reserve(part)
        fill(target)
        target.flush()
        del target  # Windows renames no file that is mapped
    return open_array(path, shape, dtype)


def find_array(key: str, shape: tuple[int, ...], dtype: Any) -> MappedArray | None:
    """The array of this key, if it is there."""
    path = cache_folder() / f"{key}.npy"
    with contextlib.suppress(Exception):  # missing, or damaged in whatever way numpy finds
        array = open_array(path, shape, dtype)
        with contextlib.suppress(OSError):  # another's cache, which we may only read
            os.utime(path)
        return array
    return None


def _reserve(path: Path) -> None:
    """Take the room of a mapped file from the disk: on a full one its first use would kill us."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        try:
            if not hasattr(os, "posix_fallocate"):  # macOS, Windows
                raise OSError(errno.EOPNOTSUPP, "")
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise OSError(error.errno, error.strerror, str(path)) from error
            head = file.read(1 << 20)
            file.seek(0)
            for start in range(0, size, 1 << 20):  # the old way: write it all
                file.write(head if start == 0 else bytes(min(1 << 20, size - start)))


def open_array(path: Path, shape: tuple[int, ...], dtype: Any) -> MappedArray:
    """An array of the cache from its file, read only."""
    array = np.load(files.regular(path), mmap_mode="r", allow_pickle=False)
    whole = array.offset + array.nbytes == path.stat().st_size
    if array.shape != shape or array.dtype != dtype or not whole:
        raise ValueError(f"{path} is not what it should be.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only: nobody writes to it
        return MappedArray(torch.from_numpy(array), array._mmap, path)


@functools.lru_cache(maxsize=1)  # once a process: a folder of many arrays takes a while
def _remove_unused(folder: Path) -> None:
    """Remove arrays of ours that nobody used for long, their notes, and interrupted builds."""
    if not (folder / MARKER).is_file():
        return  # the folder was somebody's before it was ours
    files.sweep(path for path in folder.glob(".*.part") if OWN_NAME.fullmatch(path.name))
    for path in sorted(folder.iterdir(), reverse=True):  # an array before its note
        with contextlib.suppress(OSError):  # another process was faster
            note = path.suffix == ".json" and path.with_suffix(".npy").exists()
            old = time.time() - path.lstat().st_mtime > KEPT_SECONDS
            if old and not note and OWN_NAME.fullmatch(path.name):
                path.unlink()
