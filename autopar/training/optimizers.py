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
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Attr


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer as an op.

    Attributes:
        kind: Kind of the update op. It reads the parameter, its moments, its gradient and, if `counts`, the number of
            the step from 1; it writes the new parameter and the new moments.
        moments: Suffixes of the moments' names, in the order of the op's inputs.
        counts: Whether the op reads the number of the step.
        attrs: Hyperparameters.
        whole: Whether the update reads whole matrices, so that devices cannot share one.
        others: Name of the optimizer of all but the weights of products in layers; "" if this one trains everything.
    """

    kind: str
    moments: tuple[str, ...]
    counts: bool
    attrs: Mapping[str, Attr]
    whole: bool = False
    others: str = ""


_ADAM: Mapping[str, Attr] = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0}

OPTIMIZERS: Mapping[str, Optimizer] = {
    "adam": Optimizer("autopar::Adam", ("m", "v"), counts=True, attrs=_ADAM),
    "adamw": Optimizer("autopar::Adam", ("m", "v"), counts=True, attrs={**_ADAM, "weight_decay": 0.01}),
    "sgd": Optimizer("autopar::SGD", ("m",), counts=False, attrs={"learning_rate": 1e-2, "momentum": 0.9}),
    "lion": Optimizer(
        "autopar::Lion",
        ("m",),
        counts=False,
        attrs={"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0},
    ),
    "muon": Optimizer(
        "autopar::Muon",
        ("m",),
        counts=False,
        attrs={"learning_rate": 1e-3, "momentum": 0.95, "epsilon": 1e-7, "weight_decay": 0.1},
        whole=True,
        others="adamw",
    ),
}
"""Every optimizer by name, with PyTorch's defaults (torch.optim.Adam, AdamW, Muon; SGD with the usual momentum), and
those of Lion's authors."""
