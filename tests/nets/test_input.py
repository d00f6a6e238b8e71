"""A pretrained network is shown images as its weights' own configuration says."""

from __future__ import annotations

import pytest
import timm
import torch

from calmatch import nets
from calmatch.fit import portfolio
from calmatch.options import NETWORKS


@pytest.mark.parametrize("name", nets.LITE[:3])
def test_ours_say_what_timm_says_of_the_same_weights(name):
    net = nets.build(f"{name}(pretrained=False)", 2, 64)
    theirs = timm.get_pretrained_cfg(f"tf_{name}")
    own = nets.input_of(net)
    assert own.mean == tuple(theirs.mean)
    assert own.std == tuple(theirs.std)
    assert own.size == theirs.input_size[-1] == NETWORKS[name].pixels


@pytest.mark.parametrize(
    "name",
    ["resnet18", "vit_tiny_patch16_224.augreg_in21k", "mobilenetv2_100", "tf_efficientnet_lite0"],
)
def test_any_model_of_timms_gets_its_own_input(name):
    extractor = portfolio.load_extractor(f"timm.{name}", None, torch.device("cpu"))
    theirs = timm.data.resolve_data_config({}, model=extractor.body.model)
    assert extractor.size == theirs["input_size"][-1]
    assert extractor.mean == tuple(theirs["mean"])
    assert extractor.std == tuple(theirs["std"])
    shown = torch.full((1, 3, extractor.size, extractor.size), 255, dtype=torch.uint8)
    seen: list[torch.Tensor] = []
    extractor.quick.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    if hasattr(extractor.quick.model, "forward_intermediates"):
        whole = extractor.quick.model.forward_intermediates
        extractor.quick.model.forward_intermediates = lambda x, **k: (
            seen.append(x),
            whole(x, **k),
        )[1]
    extractor(shown)
    white = [(1 - m) / s for m, s in zip(theirs["mean"], theirs["std"], strict=True)]
    torch.testing.assert_close(seen[0].amax((0, 2, 3)), torch.tensor(white), atol=1e-4, rtol=1e-4)


def test_every_network_is_listed_with_its_size():
    assert {name for name in NETWORKS if "." not in name} == set(nets.NETS) - {"timm"}
    for name, known in NETWORKS.items():
        if "." not in name and name not in ("embedded", "tiny"):
            settings = "(pretrained=False)" if name in nets.LITE else ""
            with torch.device("meta"):
                net = nets.build(name + settings, 10, known.pixels or 32)
            millions = sum(p.numel() for p in net.parameters()) / 1e6
            assert known.millions == pytest.approx(millions, rel=0.06), name
