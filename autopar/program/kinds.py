"""The numbers of kinds of blocks in programs."""

from autopar.folding.fold import Folded


def program_kind(folded: Folded, variant: int, kind: int) -> int:
    """Return the number that a kind of the graph has in programs, on a variant of the plan."""
    return variant * len(folded.kinds) + kind


def graph_kind(folded: Folded, kind: int) -> int:
    """Return the kind of the graph that a kind of a program is."""
    return kind % len(folded.kinds)
