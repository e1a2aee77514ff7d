"""A kernel that calls one which other kernels alone can call."""

from autopar.compiled import compiled, inner


@inner
def doubled(number: int) -> int:
    """Return twice a number."""
    return 2 * number


@compiled
def tripled(number: int) -> int:
    """Return three times a number."""
    return doubled(number) + number
