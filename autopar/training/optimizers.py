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
Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5, as torch.optim.Adafactor), without momentum:
    w = t^-0.8,  r' = r + w (mean over columns of g^2 - r),  c' = c + w (mean over rows of g^2 - c)
    v = r' c' / max(mean of r', e1),  u = g / sqrt(max(v, e1^2)),  a = min(rate, 1 / sqrt(t)) max(e2, rms(p))
    p' = (1 - rate decay) p - a u / max(1, rms(u) / d)
    A vector has v' = v + w (g^2 - v). Sums over a tensor are outputs of ops of their own, so that devices that hold
    shards of it add theirs up. The root mean square of p is kept from update to update.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal

from autopar.ir.graph import Attr, Value

BLOCK = 256
"""Elements of a moment in 8 bits that share a scale, as in bitsandbytes."""
_LEAST = 4096
"""Elements of a parameter from which on bitsandbytes keeps its moments in 8 bits."""


Form = Literal["", "bytes", "scales", "rows", "columns", "matrices", "number"]
"""Form of what an update keeps or makes: "" for a tensor like the parameter; "bytes" for one of bytes; "scales" for a
number per `BLOCK` elements of the last dim; a number per row, per column or per matrix of the last two dims; or one."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A state that an optimizer keeps of every parameter.

    Attributes:
        suffix: Ends its name, after that of the parameter.
        form: Shape, and dtype if not that of the parameter.
    """

    suffix: str
    form: Form = ""

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
            case "rows":
                return (*shape[:-1], 1), dtype
            case "columns":
                return (*shape[:-2], 1, shape[-1]), dtype
            case "matrices":
                return (*shape[:-2], 1, 1), dtype
            case "number":
                return (), dtype
            case _:
                return shape, dtype


@dataclass(frozen=True, slots=True)
class Part:
    """An op of an update that consists of several.

    Attributes:
        kind: Kind of the op.
        reads: Its inputs: "p" for the parameter, "g" for its gradient, "t" for the number of the step, a moment, or
            what another op makes.
        makes: Its outputs; "p" and names of moments for the new ones. An op that makes a new moment reads the old one.
        attrs: Which of the optimizer's hyperparameters it has, and sizes of the parameter: "elements", "rows" and
            "columns" of its matrices.
    """

    kind: str
    reads: tuple[str, ...]
    makes: tuple[Moment, ...]
    attrs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer as an op, or as several.

    Attributes:
        kind: Kind of the update op. It reads the parameter, its moments, its gradient and, if `counts`, the number of
            the step from 1; it writes the new parameter and the new moments.
        moments: What it keeps, in the order of the op's inputs.
        counts: Whether the op reads the number of the step.
        attrs: Hyperparameters.
        whole: Whether an update reads more than the element it changes: a matrix, a block. Devices cannot share that.
        trains: Which parameters it is for: "all", those of two dims and more ("matrices"), the "layer matrices"
            (weights of products in layers), or tensors of whole "blocks" along the last dim.
        others: Optimizer of the others; None if there are none.
        parts: Ops of the update, where it is not the one of `kind`.
    """

    kind: str
    moments: tuple[Moment, ...]
    counts: bool
    attrs: Mapping[str, Attr]
    whole: bool = False
    trains: Literal["all", "matrices", "layer matrices", "blocks"] = "all"
    others: "Optimizer | None" = None
    parts: tuple[Part, ...] = ()

    def takes(self, parameter: Value, layer_matrices: Set[str]) -> bool:
        """Whether a parameter is one that this optimizer is for.

        Args:
            parameter: The parameter.
            layer_matrices: Names of the weights of products in layers.
        """
        match self.trains:
            case "matrices":
                return len(parameter.shape) > 1
            case "layer matrices":
                return parameter.name in layer_matrices
            case "blocks":
                return parameter.size >= _LEAST and not parameter.shape[-1] % BLOCK
            case _:
                return True

    def update(self, parameter: Value) -> tuple[Part, ...]:
        """Return the ops of the update of a parameter."""
        if self.parts:
            return self.parts
        reads = ("p", *(moment.suffix for moment in self.moments), "g", *(("t",) if self.counts else ()))
        return (Part(self.kind, reads, (Moment("p"), *self.moments), tuple(self.attrs)),)

    def attributes(self, part: Part, parameter: Value) -> dict[str, Attr]:
        """Return the attributes of an op of the update of a parameter."""
        sizes: dict[str, Attr] = {"elements": float(parameter.size)}
        if len(parameter.shape) > 1:
            sizes |= {"rows": float(parameter.shape[-2]), "columns": float(parameter.shape[-1])}
        return {name: self.attrs[name] if name in self.attrs else sizes[name] for name in part.attrs}


_ADAM: Mapping[str, Attr] = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0}
_ADAMW = Optimizer("autopar::Adam", (Moment("m"), Moment("v")), counts=True, attrs={**_ADAM, "weight_decay": 0.01})
_ADAFACTOR: Mapping[str, Attr] = {
    "learning_rate": 1e-2, "decay_power": -0.8, "epsilon1": 2.0**-23, "epsilon2": 1e-3, "clip": 1.0, "weight_decay": 0.0
}  # fmt: skip
_STEP = ("learning_rate", "epsilon1", "epsilon2", "clip", "weight_decay", "elements")
_LENGTH = Part("autopar::AdafactorLength", ("length", "square"), (Moment("length", "number"),), ("elements",))
_ROW, _COLUMN = Moment("row", "rows"), Moment("column", "columns")
_ESTIMATE = ("row.new", "column.new", "total")
_ADAFACTOR_VECTORS = Optimizer(
    "autopar::AdafactorVector",
    (Moment("v"), Moment("length", "number")),
    counts=True,
    attrs=_ADAFACTOR,
    parts=(
        Part("autopar::AdafactorVariance", ("v", "g", "t"), (Moment("v"),), ("decay_power",)),
        Part("autopar::AdafactorVectorMoved", ("g", "v.new"), (Moment("moved", "number"),), ("epsilon1",)),
        Part(
            "autopar::AdafactorVector", ("p", "g", "v.new", "moved", "length", "t"),
            (Moment("p"), Moment("square", "number")), _STEP,
        ),
        _LENGTH,
    ),
)  # fmt: skip

OPTIMIZERS: Mapping[str, Optimizer] = {
    "adam": Optimizer("autopar::Adam", (Moment("m"), Moment("v")), counts=True, attrs=_ADAM),
    "adamw": _ADAMW,
    "adamw-8bit": Optimizer(
        "autopar::Adam8Bit",
        (Moment("m", "bytes"), Moment("m.scale", "scales"), Moment("v", "bytes"), Moment("v.scale", "scales")),
        counts=True,
        attrs={**_ADAM, "weight_decay": 0.01},
        whole=True,
        trains="blocks",
        others=_ADAMW,
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
        others=_ADAMW,
    ),
    "adafactor": Optimizer(
        "autopar::Adafactor",
        (_ROW, _COLUMN, Moment("length", "number")),
        counts=True,
        attrs=_ADAFACTOR,
        trains="matrices",
        others=_ADAFACTOR_VECTORS,
        parts=(
            Part("autopar::AdafactorSquares", ("g",), (Moment("rows", "rows"), Moment("columns", "columns"))),
            Part(
                "autopar::AdafactorRows",
                ("row", "rows", "t"),
                (_ROW, Moment("total", "matrices")),
                ("decay_power", "columns"),
            ),
            Part("autopar::AdafactorColumns", ("column", "columns", "t"), (_COLUMN,), ("decay_power", "rows")),
            Part("autopar::AdafactorMoved", ("g", *_ESTIMATE), (Moment("moved", "number"),), ("epsilon1", "rows")),
            Part(
                "autopar::Adafactor",
                ("p", "g", *_ESTIMATE, "moved", "length", "t"),
                (Moment("p"), Moment("square", "number")),
                (*_STEP, "rows"),
            ),
            _LENGTH,
        ),
    ),
}
"""Every optimizer by name, with PyTorch's defaults (torch.optim.Adam, AdamW, Muon, Adafactor; SGD with the usual
momentum), and those of Lion's authors."""
