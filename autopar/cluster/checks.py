"""Checks of the numbers in cluster records; each error names the owner, the field and what it must be."""

import math

from autopar.errors import ClusterError


def require_positive(owner: str, **fields: float) -> None:
    """Raise `ClusterError` unless every field is a finite number above 0."""
    for name, value in fields.items():
        if not (math.isfinite(value) and value > 0):
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
    """Raise `ClusterError` unless every field is a whole number from `least` on."""
    for name, value in fields.items():
        if value < least:
            wanted = "a positive whole number" if least == 1 else f"a whole number from {least} on"
            raise ClusterError(f"{owner}: {name} is {value}", hint=f"it is {wanted}")
