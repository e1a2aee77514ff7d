"""What a configuration of a framework states: degrees, model, precision, and what of it is taken otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost import Stack
from autopar.degrees import Degrees
from autopar.errors import ExportError
from autopar.limits import MAX_DEVICES


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration of a framework as something to predict.

    Attributes:
        degrees: The plan.
        model: The model.
        dims: Sizes that differ from those of the model's name.
        precision: A key of `autopar.cost.POLICIES`; None if it does not say.
        understood: What was taken from it, a sentence each.
        ignored: What was not, each with its value.
        assumed: What the prediction takes otherwise than the framework would, a sentence each.
        first_layers: Layers of every stage, the first ones, that recompute; 0 for all.
        software: Fields of the software stack that it states, by name.
    """

    degrees: Degrees
    model: str
    dims: Mapping[str, int]
    precision: str | None
    understood: tuple[str, ...]
    ignored: tuple[str, ...]
    assumed: tuple[str, ...] = ()
    first_layers: int = 0
    software: tuple[tuple[str, Any], ...] = ()

    def stack(self, usual: Stack) -> Stack:
        """Return the software stack with what the configuration states of it."""
        return replace(usual, **dict(self.software))


def data_parallel_degree(gpus: int | None, shape: Mapping[str, int]) -> int:
    """Return the data-parallel degree of a number of devices, given the other degrees.

    Raises:
        ExportError: If the number is not known, or not divisible by the degrees.
    """
    product = 1
    for degree in shape.values():
        product *= degree
    if gpus is None:
        raise ExportError("the configuration does not say on how many devices it runs", hint="give --gpus N")
    if max(gpus, product) > MAX_DEVICES:
        raise ExportError(
            f"{max(gpus, product)} devices are more than can be planned", hint=f"at most {MAX_DEVICES} can"
        )
    if gpus % product:
        stated = " x ".join(f"{name} {degree}" for name, degree in shape.items())
        raise ExportError(f"{gpus} devices are not divisible by {stated}", hint=f"give a multiple of {product}")
    return gpus // product
