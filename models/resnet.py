"""Bottleneck ResNets (He et al. 2016) and wide ones (Zagoruyko & Komodakis 2016; Zheng et al. 2022).

Version 1.5: the stride of a stage sits in the 3x3 convolution of its first block. Batch normalisation uses the stored
statistics, which are buffers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.models import layers
from autopar.models.builder import Builder
from autopar.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class ResnetConfig:
    """Hyperparameters of a ResNet.

    Attributes:
        blocks: Bottleneck blocks per stage.
        channels: Channels of the stem; stage i has blocks of `channels * 2**i`, giving out four times that.
        squeeze_width: Factor on the channels between the first 1x1 and the 3x3 convolution.
        conv_width: Factor on the channels between the 3x3 and the last 1x1 convolution.
        image_size: Pixels of an image's side.
        classes: Classes of the head.
    """

    blocks: tuple[int, ...]
    channels: int = 64
    squeeze_width: int = 1
    conv_width: int = 1
    image_size: int = 224
    classes: int = 1000

    @property
    def num_layers(self) -> int:
        """Convolutions on the longest path, and the head: the 50 in ResNet-50."""
        return 3 * sum(self.blocks) + 2

    @property
    def sample_size(self) -> int:
        """Pixels of an image's side."""
        return self.image_size


def _conv_norm(
    g: Builder, x: str, name: str, num_in: int, num_out: int, *, kernel: int, stride: int = 1, relu: bool = True
) -> str:
    """Return convolution (no bias, size kept at stride 1), batch normalisation and, if asked for, ReLU."""
    weight = g.parameter(
        f"{name}.weight", (num_out, num_in, kernel, kernel), f"normal {(2 / (num_in * kernel**2)) ** 0.5:.6g}"
    )
    pad = kernel // 2
    y = g.op(
        "Conv", x, weight, name=name, kernel_shape=(kernel, kernel), strides=(stride, stride), pads=(pad, pad, pad, pad)
    )
    norm = f"{name}.norm"
    y = g.op(
        "BatchNormalization",
        y,
        g.parameter(f"{norm}.weight", (num_out,), "constant 1"),
        g.parameter(f"{norm}.bias", (num_out,), "constant 0"),
        g.buffer(f"{norm}.mean", (num_out,), "constant 0"),
        g.buffer(f"{norm}.var", (num_out,), "constant 1"),
        name=norm,
        epsilon=1e-5,
    )
    return g.op("Relu", y, name=f"{name}.relu") if relu else y


def _bottleneck(g: Builder, x: str, name: str, num_in: int, channels: int, stride: int, config: ResnetConfig) -> str:
    squeezed, wide, num_out = channels * config.squeeze_width, channels * config.conv_width, 4 * channels
    y = _conv_norm(g, x, f"{name}.conv1", num_in, squeezed, kernel=1)
    y = _conv_norm(g, y, f"{name}.conv2", squeezed, wide, kernel=3, stride=stride)
    y = _conv_norm(g, y, f"{name}.conv3", wide, num_out, kernel=1, relu=False)
    if num_in != num_out or stride != 1:
        x = _conv_norm(g, x, f"{name}.shortcut", num_in, num_out, kernel=1, stride=stride, relu=False)
    return g.op("Relu", g.op("Add", y, x, name=f"{name}.residual"), name=name)


def build(name: str, config: ResnetConfig) -> "onnx.ModelProto":
    """Return the graph from `images` float32 [batch, 3, image_size, image_size] to `logits` [batch, classes]."""
    g = Builder(name)
    images = g.input("images", ("batch", 3, config.image_size, config.image_size))
    x = _conv_norm(g, images, "stem", 3, config.channels, kernel=7, stride=2)
    x = g.op("MaxPool", x, name="stem.pool", kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    width = config.channels
    for stage, num_blocks in enumerate(config.blocks):
        channels = config.channels * 2**stage
        for index in range(num_blocks):
            stride = 2 if stage > 0 and index == 0 else 1
            x = _bottleneck(g, x, f"stages.{stage}.{index}", width, channels, stride, config)
            width = 4 * channels
    x = g.op("Flatten", g.op("GlobalAveragePool", x, name="pooled"), name="pooled.flat", axis=1)
    layers.linear(g, x, "logits", width, config.classes)
    return g.model({"logits": ("batch", config.classes)})


# ResNet: batch 256 (section 3.4); counts of torchvision's models, whose wide ones double the width inside a block.
_TORCHVISION = "He et al. 2016, section 3.4; torchvision"
# Alpa's series: batch 1536 (1520 for 13B), 1024 classes, the factor on the 3x3 convolution only. Published counts are
# the rounded ones in the names; "6.8B" is 6.73e9 and "13B" 12.63e9 by this arithmetic.
_ALPA = "Zheng et al. 2022 (Alpa, OSDI'22); alpa-projects/alpa, benchmark/alpa/suite_wresnet.py"


def _spec(name: str, count: int, batch: int, source: str, config: ResnetConfig) -> ModelSpec:
    return ModelSpec(name, "resnet", count, batch, "image", source, config)


def _alpa(blocks: tuple[int, ...], channels: int, width: int) -> ResnetConfig:
    return ResnetConfig(blocks, channels, conv_width=width, classes=1024)


_50, _101, _152 = (3, 4, 6, 3), (3, 4, 23, 3), (3, 8, 36, 3)

SPECS = (
    _spec("resnet50", 25_557_032, 256, _TORCHVISION, ResnetConfig(_50)),
    _spec("resnet101", 44_549_160, 256, _TORCHVISION, ResnetConfig(_101)),
    _spec("resnet152", 60_192_808, 256, _TORCHVISION, ResnetConfig(_152)),
    _spec("wide-resnet50-2", 68_883_240, 256, _TORCHVISION, ResnetConfig(_50, squeeze_width=2, conv_width=2)),
    _spec("wide-resnet101-2", 126_886_696, 256, _TORCHVISION, ResnetConfig(_101, squeeze_width=2, conv_width=2)),
    _spec("wide-resnet-250m", 254_123_104, 1536, _ALPA, _alpa(_50, 160, 2)),
    _spec("wide-resnet-500m", 495_046_176, 1536, _ALPA, _alpa(_50, 224, 2)),
    _spec("wide-resnet-1b", 1_005_653_184, 1536, _ALPA, _alpa(_50, 320, 2)),
    _spec("wide-resnet-2b", 1_965_011_008, 1536, _ALPA, _alpa(_50, 448, 2)),
    _spec("wide-resnet-4b", 4_000_937_344, 1536, _ALPA, _alpa(_50, 640, 2)),
    _spec("wide-resnet-6.8b", 6_727_679_424, 1536, _ALPA, _alpa(_50, 320, 16)),
    _spec("wide-resnet-13b", 12_633_386_944, 1520, _ALPA, _alpa(_101, 320, 16)),
)
"""All ResNets."""
