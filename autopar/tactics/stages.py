"""Cutting the chain of blocks into stages.

Repeated blocks are the layers. What comes before the first layer joins the first stage, what comes after the last one
joins the last.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

from autopar.errors import TacticError
from autopar.folding.fold import Folded
from autopar.folding.graph_facts import layer_kinds
from autopar.ir.graph import Role


def layers(folded: Folded) -> list[int]:
    """Return the places in the chain of the blocks whose forward repeats; of all blocks if none does."""
    kinds = layer_kinds(folded)
    repeated = [index for index, kind in enumerate(folded.chain) if kind in kinds]
    return repeated or list(range(folded.num_blocks))


def moment_elements(folded: Folded) -> tuple[float, ...]:
    """Return the elements of the optimizer's state that one block of each kind updates."""
    moments = {state.input for state in folded.graph.states if state.role is Role.MOMENT}
    return tuple(
        float(sum(prod(folded.graph.values[name].shape) for op in kind.ops for name in moments.intersection(op.inputs)))
        for kind in folded.kinds
    )


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

    Layers are dealt out evenly, all blocks alike where there are too few layers for that.

    Raises:
        TacticError: If there are more stages than blocks.
    """
    number, total = len(layers(folded)), folded.num_blocks
    if stages > total:
        others = f" and {total - number} other blocks" if total > number else ""
        raise TacticError(
            f"{number} layers{others} cannot be cut into {stages} stages", hint=f"use at most {total} stages"
        )
    if stages <= number + 2:  # the ends may have no layer, only what surrounds them
        counts = _blocks(folded, even_layers(number, stages))
        if 0 not in counts:
            return counts
    whole, more = divmod(total, stages)
    first = (stages - more) // 2  # the longer stages lie in the middle here, too
    return tuple(whole + (first <= index < first + more) for index in range(stages))


def blocks_per_stage(
    folded: Folded, layers_per_stage: Sequence[int], predictions: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the number of blocks of every stage, given how many of them are layers.

    Args:
        folded: The graph of one microbatch.
        layers_per_stage: Layers per stage.
        predictions: Modules of multi-token prediction per stage, the blocks before the last one; empty if the last
            stage has all that comes after the layers.

    Raises:
        TacticError: If that leaves a stage without blocks, or is negative or not the number of layers there are.
    """
    number, stages = len(layers(folded)), len(layers_per_stage)
    if sum(layers_per_stage) != number:
        raise TacticError(
            f"layers per stage add up to {sum(layers_per_stage)}, the model has {number}",
            hint="give one number per stage, in the order of the chain",
        )
    if min(layers_per_stage) < 0:
        raise TacticError(f"a stage of {min(layers_per_stage)} layers", hint="a stage has 0 layers or more")
    counts = _blocks(folded, layers_per_stage)
    if predictions:
        counts = _with_predictions(folded, layers_per_stage, predictions)
    if min(counts) < 1:
        raise TacticError(
            f"stage {counts.index(min(counts))} of {stages} would have no block: "
            f"{number} layers, {folded.num_blocks - number} other blocks",
            hint=f"use at most {number} stages",
        )
    return counts


def _blocks(folded: Folded, layers_per_stage: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks of every stage that ends with its last layer, the last one with the chain."""
    places = layers(folded)
    ends = [places[end - 1] + 1 if end else places[0] for end in accumulate(layers_per_stage)]
    ends[-1] = folded.num_blocks
    return tuple(stop - start for start, stop in pairwise([0, *ends]))


def _with_predictions(folded: Folded, layers_per_stage: Sequence[int], predictions: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks of every stage where modules of multi-token prediction lie as given."""
    places, modules = layers(folded), sum(predictions)
    first = folded.num_blocks - 1 - modules  # the last block has the head
    if first <= places[-1]:
        after = folded.num_blocks - places[-1] - 1
        raise TacticError(
            f"{modules} modules of multi-token prediction, and {after} blocks after the last layer",
            hint="give as many as the model has: --set mtp=N",
        )
    ends, held = [], 0
    for end, count in zip(accumulate(layers_per_stage), predictions, strict=True):
        held += count
        if held and end < len(places):
            raise TacticError("a module of multi-token prediction lies before the last layer", hint="put it after it")
        ends.append(first + held if held else places[end - 1] + 1 if end else places[0])
    ends[-1] = folded.num_blocks
    return tuple(stop - start for start, stop in pairwise([0, *ends]))
