"""Optimizers: one update op per parameter and step, whose moments are states of the step.

Adam (Kingma & Ba 2015, algorithm 1), AdamW (decoupled weight decay, Loshchilov & Hutter 2019):
    m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g^2
    p' = p - rate (m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + epsilon) + decay p)
SGD with momentum (as in PyTorch): m' = momentum m + g,  p' = p - rate m'.
Lion (Chen et al. 2023, arXiv:2302.06675):
    m' = b2 m + (1 - b2) g,  p' = p - rate (sign(b1 m + (1 - b1) g) + decay p)
Muon (Jordan et al. 2024; step size and decay of Liu et al. 2025, arXiv:2502.16982), for the matrices of layers alone:
    m' = momentum m + (1 - momentum) g,  u = (1 - momentum) g + momentum m'
    p' = p - rate (0.2 sqrt(max(rows, columns)) NS(u / |u|) + decay p)
    NS: five times x' = a x + (b (x x^T) + c (x x^T)^2) x
8-bit AdamW (Dettmers et al. 2022, arXiv:2110.02861): moments are bytes between steps, times a float32 scale per 256 of
    them along the last dim: m in 127 steps to either side of 0, v in 255. bitsandbytes has uneven steps, as many bytes,
    and likewise keeps parameters of fewer than 4096 elements in float32; here, too, those with a part of a block.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal

from autopar.ir.graph import Attr, Value

BLOCK = 256
"""Elements of a moment in 8 bits that share a scale, as in bitsandbytes."""
_LEAST = 4096
"""Elements of a parameter from which on bitsandbytes keeps its moments in 8 bits."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A state that an optimizer keeps of every parameter.

    Attributes:
        suffix: Ends its name, after that of the parameter.
        form: "" for a tensor like the parameter; "bytes" for one of bytes; "scales" for a number per `BLOCK` elements
            of the last dim.
    """

    suffix: str
    form: Literal["", "bytes", "scales"] = ""

    def of(self, parameter: Value) -> tuple[tuple[int, ...], str]:
        """Return the shape and dtype of the moment of a parameter.

        >>> Moment("m.scale", "scales").of(Value("w", (8, 512), "float32"))
        ((8, 2), 'float32')
        """
        shape, dtype = parameter.shape, parameter.dtype
        match self.form:
            case "bytes":
                return shape, "uint8"
            case "scales":
                return (*shape[:-1], shape[-1] // BLOCK), dtype
            case _:
                return shape, dtype


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer as an op.

    Attributes:
        kind: Kind of the update op. It reads the parameter, its moments, its gradient and, if `counts`, the number of
            the step from 1; it writes the new parameter and the new moments.
        moments: What it keeps, in the order of the op's inputs.
        counts: Whether the op reads the number of the step.
        attrs: Hyperparameters.
        whole: Whether an update reads more than the element it changes: a matrix, a block. Devices cannot share that.
        trains: Which parameters it is for: "all", the "layer matrices" (weights of products in layers), or tensors of
            whole "blocks" along the last dim.
        others: Name of the optimizer of the others; "" if there are none.
    """

    kind: str
    moments: tuple[Moment, ...]
    counts: bool
    attrs: Mapping[str, Attr]
    whole: bool = False
    trains: Literal["all", "layer matrices", "blocks"] = "all"
    others: str = ""

    def takes(self, parameter: Value, layer_matrices: Set[str]) -> bool:
        """Whether a parameter is one that this optimizer is for.

        Args:
            parameter: The parameter.
            layer_matrices: Names of the weights of products in layers.
        """
        match self.trains:
            case "layer matrices":
                return parameter.name in layer_matrices
            case "blocks":
                return parameter.size >= _LEAST and not parameter.shape[-1] % BLOCK
            case _:
                return True


_ADAM: Mapping[str, Attr] = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0}

OPTIMIZERS: Mapping[str, Optimizer] = {
    "adam": Optimizer("autopar::Adam", (Moment("m"), Moment("v")), counts=True, attrs=_ADAM),
    "adamw": Optimizer("autopar::Adam", (Moment("m"), Moment("v")), counts=True, attrs={**_ADAM, "weight_decay": 0.01}),
    "adamw-8bit": Optimizer(
        "autopar::Adam8Bit",
        (Moment("m", "bytes"), Moment("m.scale", "scales"), Moment("v", "bytes"), Moment("v.scale", "scales")),
        counts=True,
        attrs={**_ADAM, "weight_decay": 0.01},
        whole=True,
        trains="blocks",
        others="adamw",
    ),
    "sgd": Optimizer("autopar::SGD", (Moment("m"),), counts=False, attrs={"learning_rate": 1e-2, "momentum": 0.9}),
    "lion": Optimizer(
        "autopar::Lion",
        (Moment("m"),),
        counts=False,
        attrs={"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0},
    ),
    "muon": Optimizer(
        "autopar::Muon",
        (Moment("m"),),
        counts=False,
        attrs={"learning_rate": 1e-3, "momentum": 0.95, "epsilon": 1e-7, "weight_decay": 0.1},
        whole=True,
        trains="layer matrices",
        others="adamw",
    ),
}
"""Every optimizer by name, with PyTorch's defaults (torch.optim.Adam, AdamW, Muon; SGD with the usual momentum), and
those of Lion's authors."""
