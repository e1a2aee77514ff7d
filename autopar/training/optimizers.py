"""Optimizers: one update op per parameter and step, whose moments are states of the step.

Adam (Kingma & Ba 2015, algorithm 1; decoupled weight decay of Loshchilov & Hutter 2019):
    m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g^2
    p' = p - rate (m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + epsilon) + decay p)
SGD with momentum (as in PyTorch): m' = momentum m + g,  p' = p - rate m'.
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
    """

    kind: str
    moments: tuple[str, ...]
    counts: bool
    attrs: Mapping[str, Attr]


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adam": Optimizer(
        "autopar::Adam",
        ("m", "v"),
        counts=True,
        attrs={"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0},
    ),
    "sgd": Optimizer("autopar::SGD", ("m",), counts=False, attrs={"learning_rate": 1e-2, "momentum": 0.9}),
}
"""Every optimizer by name, with PyTorch's defaults (torch.optim.Adam; SGD with the usual momentum)."""
