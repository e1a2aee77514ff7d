"""Cutting the chain of blocks into stages.

Repeated blocks are the layers. What comes before the first layer joins the first stage, what comes after the last one
joins the last.
"""

from collections.abc import Sequence
from itertools import accumulate

from autopar.errors import TacticError
from autopar.formulate.fold import Folded


def layers(folded: Folded) -> list[int]:
    """Return the places in the chain of the blocks that repeat; of all blocks if none does."""
    repeated = [index for index, kind in enumerate(folded.chain) if folded.kinds[kind].count > 1]
    return repeated or list(range(folded.num_blocks))


def even_layers(number: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of every stage.

    If layers do not divide evenly, what surrounds them counts as one layer at each end: a pipeline of 12 stages has 6
    of 70 layers each, and 5 at both ends.

    >>> even_layers(70, 12)
    (5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5)
    """
    if number % stages == 0 or stages == 1:
        return (number // stages,) * stages
    whole, more = divmod(number + 2, stages)  # the ends count as layers
    counts = [whole] * stages
    for index in range(more):  # the longer stages lie in the middle, away from the ends
        counts[(stages - more) // 2 + index] += 1
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def even_blocks(folded: Folded, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of every stage of an even cut.

    Raises:
        TacticError: If there are too many stages.
    """
    number = len(layers(folded))
    if stages > folded.num_blocks:
        raise TacticError(f"{number} layers cannot be cut into {stages} stages", hint=f"use at most {number} stages")
    return blocks_per_stage(folded, even_layers(number, stages))


def blocks_per_stage(folded: Folded, layers_per_stage: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks of every stage, given how many of them are layers.

    Raises:
        TacticError: If that leaves a stage without blocks, or is not the number of layers there are.
    """
    places = layers(folded)
    if sum(layers_per_stage) != len(places):
        raise TacticError(
            f"layers per stage add up to {sum(layers_per_stage)}, the model has {len(places)}",
            hint="give one number per stage, in the order of the chain",
        )
    counts, start, stages = [], 0, len(layers_per_stage)
    for index, end in enumerate(accumulate(layers_per_stage)):
        stop = folded.num_blocks if index == stages - 1 else (places[end - 1] + 1 if end else places[0])
        if stop <= start:
            raise TacticError(
                f"stage {index} of {stages} would have no block: "
                f"{len(places)} layers, {folded.num_blocks - len(places)} other blocks",
                hint=f"use at most {len(places)} stages",
            )
        counts.append(stop - start)
        start = stop
    return tuple(counts)
