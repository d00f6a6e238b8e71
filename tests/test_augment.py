import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy.stats import chisquare, kstest

from calmatch import augment

IMAGE = torch.randint(0, 256, (3, 12, 12), dtype=torch.uint8, generator=torch.manual_seed(0))


def draw(text, images, seed=0):
    return augment.pipeline(text)(images, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [n for n in augment.OPS if n != "identity"])
def test_every_image_gets_its_own_draw(name):
    out = draw(name, IMAGE.repeat(16, 1, 1, 1))
    assert out.dtype == torch.uint8
    assert out.shape == (16, 3, 12, 12)
    assert len({image.numpy().tobytes() for image in out}) >= (2 if "flip" in name else 6)


@pytest.mark.parametrize("name", augment.OPS)
def test_the_same_generator_gives_the_same_images_and_leaves_the_input(name):
    images = IMAGE.repeat(8, 1, 1, 1)
    before = images.clone()
    assert torch.equal(draw(name, images, 3), draw(name, images, 3))
    assert torch.equal(images, before)


def to_pil(image):
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pil(image):
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(12, 12, 3)


@pytest.mark.parametrize("degrees", [-30.0, -11.3, 0.0, 7.7, 29.0])
def test_rotation_is_pillows(degrees, monkeypatch):
    monkeypatch.setattr(augment, "_uniform", lambda images, *_: torch.full((1, 1, 1, 1), degrees))
    ours = augment.rotate(IMAGE[None], torch.Generator())[0].permute(1, 2, 0)
    theirs = from_pil(to_pil(IMAGE).rotate(degrees))
    assert (ours == theirs).float().mean() >= 0.99


@pytest.mark.parametrize("factor", [0.05, 0.4, 0.95, 1.5])
@pytest.mark.parametrize("name", ["brightness", "contrast"])
def test_colours_are_pillows_to_a_grey_level(name, factor, monkeypatch):
    monkeypatch.setattr(augment, "_uniform", lambda images, *_: torch.full((1, 1, 1, 1), factor))
    ours = augment.OPS[name](IMAGE[None], torch.Generator())[0].permute(1, 2, 0)
    enhance = {"brightness": ImageEnhance.Brightness, "contrast": ImageEnhance.Contrast}[name]
    theirs = from_pil(enhance(to_pil(IMAGE)).enhance(factor))
    assert (ours.int() - theirs.int()).abs().max() <= 1


def test_crops_are_windows_of_the_reflected_image():
    padded = torch.nn.functional.pad(IMAGE[None].float(), (2, 2, 2, 2), mode="reflect")[0]
    windows = {
        padded[:, y : y + 12, x : x + 12].to(torch.uint8).numpy().tobytes()
        for y in range(5)
        for x in range(5)
    }
    crops = {p.numpy().tobytes() for p in draw("crop(2)", IMAGE.repeat(400, 1, 1, 1))}
    assert crops == windows


def test_cutout_covers_at_most_its_share_and_at_least_something():
    out = draw("cutout(0.5)", IMAGE.repeat(200, 1, 1, 1))
    grey = torch.tensor(augment.GREY, dtype=torch.uint8)[:, None, None]
    covered = (out == grey).all(1).float().mean((1, 2))
    assert 0 < covered.mean() < 0.3
    assert covered.max() <= (7 / 12) ** 2


def test_a_crop_that_does_not_fit_says_so():
    with pytest.raises(ValueError, match="does not fit"):
        draw("crop(12)", IMAGE[None])


def photographs(n=60, size=32):
    """Patches of two real photographs that ship with scikit-learn."""
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(0)
    patches = []
    for k in range(n):
        photo = load_sample_images().images[k % 2]
        scale = int(random.integers(1, 5))
        y, x = (random.integers(0, side - size * scale) for side in photo.shape[:2])
        patch = Image.fromarray(photo[y : y + size * scale, x : x + size * scale])
        patches.append(patch.resize((size, size)))
    return patches


PHOTOS = photographs()
BATCH = torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1) for p in PHOTOS])


def pillow(name, image, value):
    """One operation as USB calls it."""
    if name in ("brightness", "color", "contrast", "sharpness"):
        return getattr(ImageEnhance, name.capitalize())(image).enhance(value)
    if name in ("autocontrast", "equalize"):
        return getattr(ImageOps, name)(image)
    if name == "identity":
        return image
    if name == "posterize":
        return ImageOps.posterize(image, max(1, int(value)))
    if name == "solarize":
        return ImageOps.solarize(image, value)
    if name == "rotate":
        return image.rotate(value)
    width, height = image.size
    matrix = {
        "shear_x": (1, value, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, value, 1, 0),
        "translate_x": (1, 0, value * width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, value * height),
    }[name]
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
EXACT = ("autocontrast", "equalize", "identity", "posterize", "solarize")


def assert_pillows(name, ours, theirs):
    """Geometric operations on nearly all pixels, tables exactly, blends to a grey level."""
    if name in GEOMETRIC:
        assert (ours == theirs).double().mean() >= 0.995
    elif name in EXACT:
        assert torch.equal(ours, theirs)
    else:
        assert (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize("name", augment.RANDAUGMENT)
def test_each_operation_is_pillows_over_its_whole_range(name):
    low, high = augment.RANGES[name]
    op = torch.full((len(BATCH),), augment.RANDAUGMENT.index(name))
    for share in (0.0, 0.13, 0.37, 0.5, 0.71, 0.999):
        values = torch.full((len(BATCH),), low + (high - low) * share)
        ours = augment.apply_operations(BATCH, op, values)
        value = float(values[0])
        theirs = torch.stack(
            [torch.from_numpy(np.array(pillow(name, p, value))).permute(2, 0, 1) for p in PHOTOS]
        )
        assert_pillows(name, ours, theirs)


def test_operations_are_drawn_uniformly_and_independently(monkeypatch):
    drawn = []
    apply = augment.apply_operations

    def noted(images, op, value):
        drawn.append((op.clone(), value.clone()))
        return apply(images, op, value)

    monkeypatch.setattr(augment, "apply_operations", noted)
    images = torch.zeros(20_000, 3, 4, 4, dtype=torch.uint8)
    augment.randaugment(images, torch.Generator().manual_seed(0), 3)
    blocks = len(drawn) // 3
    rounds = [torch.cat([drawn[3 * k + r][0] for k in range(blocks)]) for r in range(3)]
    values = torch.cat([drawn[3 * k][1] for k in range(blocks)])
    for op in rounds:
        assert chisquare(torch.bincount(op, minlength=14).numpy()).pvalue > 1e-4
    pairs = torch.bincount(rounds[0] * 14 + rounds[1], minlength=196)
    assert chisquare(pairs.numpy()).pvalue > 1e-4
    for k, name in enumerate(augment.RANDAUGMENT):
        low, high = augment.RANGES[name]
        share = ((values[rounds[0] == k] - low) / (high - low)).numpy()
        assert kstest(share, "uniform").pvalue > 1e-4, name


def test_eight_equal_images_come_out_different():
    out = draw("flip|crop(4)|randaugment(3)|cutout(0.5)", BATCH[:1].repeat(8, 1, 1, 1))
    assert len({image.numpy().tobytes() for image in out}) == 8


def test_blocks_do_not_change_the_result(monkeypatch):
    whole = draw("randaugment(3)", BATCH, 5)
    monkeypatch.setattr(augment, "BLOCK", 7)
    assert torch.equal(draw("randaugment(3)", BATCH, 5), whole)


@pytest.mark.slow
def test_a_compiled_round_equals_the_eager_one():
    op = torch.arange(len(BATCH)) % 14
    value = augment.magnitude(op, torch.rand(len(BATCH), generator=torch.manual_seed(0)))
    compiled = torch.compile(augment.apply_operations, fullgraph=True)
    same = (
        (compiled(BATCH, op, value) == augment.apply_operations(BATCH, op, value)).double().mean()
    )
    assert same >= 0.999


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("size", [24, 40, 57])  # smaller, as it is, larger
@pytest.mark.parametrize(("left", "top", "side"), [(0.0, 0.0, 1.0), (0.15, 0.0, 0.85)])
def test_a_view_is_what_pillow_resizes(left, top, side, size, flipped):
    """Up to its rounding, and at the border of a part, where Pillow looks at the part alone."""
    noise = np.random.default_rng(0).integers(0, 256, (5, 5, 3), np.uint8)
    image = Image.fromarray(noise).resize((40, 40), Image.Resampling.BICUBIC)
    box = (40 * left, 40 * top, 40 * (left + side), 40 * (top + side))
    expected = np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box)).astype(int)
    expected = expected[:, ::-1] if flipped else expected
    pixels = torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())[None]
    view = augment.View(size, left, top, side, flipped)
    shown = augment.Views([view], 40)(pixels)[0][0].numpy().transpose(1, 2, 0)
    away = np.abs(shown.astype(float) - expected)
    assert away[2:-2, 2:-2].max() < 3
    assert away.mean() < 0.5


def test_tta_views_begin_plain_and_none_is_mirrored_where_it_must_not_be():
    views = augment.tta_views(12, 224)
    assert views[0] == augment.View(224)
    assert len(set(views)) == 12
    assert {view.size for view in views} == {224, 288}
    assert {view.size for view in augment.tta_views(12, 224, larger=False)} == {224}
    assert not any(view.flipped for view in augment.tta_views(12, 224, flip=False))
