"""Formats of quantized operands: what products of linear layers run in below 16 bits, and what quantizing costs.

    format        scales                                        bytes    reads  written by the maker
    fp8           one per tensor, from maxima of earlier steps  1            1  yes
    fp8-current   one per tensor, of its own maximum            1            2  no
    fp8-block     one per 128 numbers                           1 + 4/128    1  no
    mxfp8         one of 8 bits per 32 numbers                  1 + 1/32     1  no
    nvfp4         one of 8 bits per 16 numbers                  1/2 + 1/16   2  no
    int8-current  one per row or column, of its own maximum     1            2  no
    int8          one per column of a weight                    1            -  -

`fp8` is delayed scaling of Transformer Engine, whose norms and gated activations write it; a scale of the tensor's own
maximum asks for a pass that finds it, and so does the second level of scales of nvfp4. `fp8-block` is DeepSeek-V3's
recipe (arXiv:2412.19437, section 3.3), `mxfp8` the OCP Microscaling format (arXiv:2310.10537), `nvfp4` NVIDIA's
(arXiv:2509.25149). `int8-current` is AQT's, with which MaxText trains on TPU (`quantization: int8`). `int8` keeps
weights alone in 8 bits; products run in 16.

Training reads an operand along either dim: x for the forward product and transposed for the weight gradient, dy for
the input gradient and transposed for the weight gradient, w for forward and input gradient. Tensor cores of Hopper take
8-bit operands in one order only, and blocks of scales lie along the sum, so that both copies are written. Where a
device reads either order (`Device.any_order`), a tensor with one scale has one copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """A format of quantized operands.

    Attributes:
        name: Its name.
        numbers: Class of numbers the products run in, a key of `Device.peaks`.
        bytes: Bytes of an element, scales included.
        reads: Times a kernel that quantizes reads its operand.
        by_maker: Whether norms and activations write their results quantized.
        activations: Whether activations and gradients are quantized, too.
        per_tensor: Whether a tensor has one scale.
    """

    name: str
    numbers: str
    bytes: float
    reads: int = 1
    by_maker: bool = False
    activations: bool = True
    per_tensor: bool = False


FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format("fp8", "fp8", 1.0, by_maker=True, per_tensor=True),
        Format("fp8-current", "fp8", 1.0, reads=2, per_tensor=True),
        Format("fp8-block", "fp8", 1 + 4 / 128),
        Format("mxfp8", "fp8", 1 + 1 / 32),
        Format("nvfp4", "fp4", 1 / 2 + 1 / 16, reads=2),
        Format("int8-current", "int8", 1.0, reads=2),
        Format("int8", "half", 1.0, activations=False),
    )
}
"""Formats by name."""

COPIES = 2
"""Copies of an operand that two products read along different dims."""
