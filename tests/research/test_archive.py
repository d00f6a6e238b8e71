"""research/archive.py: a dataset in one small file, and back."""

from pathlib import Path

import numpy as np
import pytest
import torch

from calmatch.data.dataset import build
from calmatch.files import write, write_npz
from research import archive

READER = "research.archive.read_archive"


def test_an_archive_holds_a_dataset_slightly_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("CALMATCH_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("CALMATCH_CACHE", str(tmp_path / "cache"))
    whole = build("synthetic(per_class=200)")  # 800 images: the last sheet is not full
    content, note = archive.make_archive(whole, 1 << 20)
    path = tmp_path / "data" / "archive" / "blobs.npz"
    path.parent.mkdir(parents=True)
    write(path, content)
    for name in ("blobs", str(path)):
        dataset = build(f"{READER}(name={name!r})")
        assert (dataset.classes, dataset.mean) == (whole.classes, whole.mean)
        assert torch.equal(dataset.labels, whole.labels)
        assert torch.equal(dataset.test_labels, whole.test_labels)
        change = (dataset.test_images.float() - whole.test_images.float()).square().mean()
        assert float(10 * torch.log10(255**2 / change)) == pytest.approx(note["psnr"], abs=1)
    small = build(f"{READER}(name='blobs', size=4, most=100)")
    assert small.images.shape == (100, 3, 4, 4)
    with pytest.raises(ValueError, match=r"no archive .*research/archive\.py"):
        build(f"{READER}(name='nothing')")
    with np.load(path) as arrays:
        write_npz(path, **{**arrays, "ends": arrays["ends"][:-1]})
    with pytest.raises(ValueError, match="damaged or no archive"):
        build(f"{READER}(name='blobs', size=6)")


TINY_IMAGENET = Path(__file__).parents[3] / "shared" / "data" / "tiny_imagenet_32.npz"


@pytest.mark.slow
@pytest.mark.skipif(not TINY_IMAGENET.is_file(), reason="tiny_imagenet_32.npz is not here")
def test_the_archive_of_tiny_imagenet_is_read():
    dataset = build(f"{READER}(name={str(TINY_IMAGENET)!r})")
    assert dataset.images.shape == (95_000, 3, 32, 32)
    assert dataset.test_images.shape == (5_000, 3, 32, 32)
    assert (len(dataset.classes), int(dataset.labels.max())) == (200, 199)
