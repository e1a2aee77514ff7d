"""Checks of the numbers in cluster records; each error names the owner, the field and what it must be."""

import math

from autopar.errors import ClusterError
from autopar.limits import MAX_DEVICES

_LEAST = 1e-30
"""Of rates, bytes and seconds that are not 0."""


def require_positive(owner: str, **fields: float) -> None:
    """Raise `ClusterError` unless every field is a finite number above 0, and what is divided by it is finite, too."""
    for name, value in fields.items():
        if not (math.isfinite(value) and value > _LEAST):
            raise ClusterError(f"{owner}: {name} is {value:g}", hint=f"{name} is a positive number")


def require_not_negative(owner: str, **fields: float) -> None:
    """Raise `ClusterError` unless every field is a finite number, 0 or above."""
    for name, value in fields.items():
        if not (math.isfinite(value) and value >= 0):
            raise ClusterError(f"{owner}: {name} is {value:g}", hint=f"{name} is 0 or a positive number")


def require_share(owner: str, **fields: float) -> None:
    """Raise `ClusterError` unless every field is above 0 and at most 1."""
    for name, value in fields.items():
        if not 0 < value <= 1:
            raise ClusterError(
                f"{owner}: {name} is {value:g}", hint=f"{name} is a share of the peak: above 0, at most 1"
            )


def require_whole(owner: str, least: int, **fields: int) -> None:
    """Raise `ClusterError` unless every field is a whole number from `least` to `MAX_DEVICES`."""
    for name, value in fields.items():
        if not least <= value <= MAX_DEVICES:
            wanted = "a positive whole number" if least == 1 else f"a whole number from {least} on"
            wanted = wanted if value < least else f"at most {MAX_DEVICES}"
            raise ClusterError(f"{owner}: {name} is {value}", hint=f"it is {wanted}")
