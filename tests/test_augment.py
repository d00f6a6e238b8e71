import pytest
import torch
from PIL import Image, ImageEnhance

from calmatch import augment
from calmatch.augment import basic

PICTURE = torch.randint(0, 256, (3, 12, 12), dtype=torch.uint8, generator=torch.manual_seed(0))


def draw(text, images, seed=0):
    return augment.pipeline(text)(images, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [n for n in augment.OPS if n != "identity"])
def test_every_picture_gets_its_own_draw(name):
    out = draw(name, PICTURE.repeat(16, 1, 1, 1))
    assert out.dtype == torch.uint8
    assert out.shape == (16, 3, 12, 12)
    assert len({picture.numpy().tobytes() for picture in out}) >= (2 if "flip" in name else 6)


@pytest.mark.parametrize("name", augment.OPS)
def test_the_same_generator_gives_the_same_pictures_and_leaves_the_input(name):
    images = PICTURE.repeat(8, 1, 1, 1)
    before = images.clone()
    assert torch.equal(draw(name, images, 3), draw(name, images, 3))
    assert torch.equal(images, before)


def to_pil(picture):
    return Image.fromarray(picture.permute(1, 2, 0).numpy())


def from_pil(picture):
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(12, 12, 3)


@pytest.mark.parametrize("degrees", [-30.0, -11.3, 0.0, 7.7, 29.0])
def test_rotation_is_pillows(degrees, monkeypatch):
    monkeypatch.setattr(basic, "_uniform", lambda images, *_: torch.full((1, 1, 1, 1), degrees))
    ours = basic.rotate(PICTURE[None], torch.Generator())[0].permute(1, 2, 0)
    theirs = from_pil(to_pil(PICTURE).rotate(degrees))
    assert (ours == theirs).float().mean() >= 0.99


@pytest.mark.parametrize("factor", [0.05, 0.4, 0.95, 1.5])
@pytest.mark.parametrize("name", ["brightness", "contrast"])
def test_colours_are_pillows_to_a_grey_level(name, factor, monkeypatch):
    monkeypatch.setattr(basic, "_uniform", lambda images, *_: torch.full((1, 1, 1, 1), factor))
    ours = augment.OPS[name](PICTURE[None], torch.Generator())[0].permute(1, 2, 0)
    enhance = {"brightness": ImageEnhance.Brightness, "contrast": ImageEnhance.Contrast}[name]
    theirs = from_pil(enhance(to_pil(PICTURE)).enhance(factor))
    assert (ours.int() - theirs.int()).abs().max() <= 1


def test_crops_are_windows_of_the_reflected_picture():
    padded = torch.nn.functional.pad(PICTURE[None].float(), (2, 2, 2, 2), mode="reflect")[0]
    windows = {
        padded[:, y : y + 12, x : x + 12].to(torch.uint8).numpy().tobytes()
        for y in range(5)
        for x in range(5)
    }
    found = {p.numpy().tobytes() for p in draw("crop(2)", PICTURE.repeat(400, 1, 1, 1))}
    assert found == windows


def test_cutout_covers_at_most_its_share_and_at_least_something():
    out = draw("cutout(0.5)", PICTURE.repeat(200, 1, 1, 1))
    grey = torch.tensor(basic.GREY, dtype=torch.uint8)[:, None, None]
    covered = (out == grey).all(1).float().mean((1, 2))
    assert 0 < covered.mean() < 0.3
    assert covered.max() <= (7 / 12) ** 2


def test_a_crop_that_does_not_fit_says_so():
    with pytest.raises(ValueError, match="does not fit"):
        draw("crop(12)", PICTURE[None])
