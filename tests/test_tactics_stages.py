"""Even cuts of chains of blocks, whatever repeats in them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.bench.specs import spec
from autopar.errors import TacticError
from autopar.folding.fold import BlockKind, Folded
from autopar.tactics.stages import blocks_per_stage, even_blocks, even_layers, layers
from autopar.workload import open_workload


@cache
def _model() -> Folded:
    return open_workload("zoo:mlp-xs").folded(2)


def _chain(kinds: Sequence[int]) -> Folded:
    """Return a chain of blocks of some kinds: cutting looks at nothing else."""
    chain = tuple(sorted(set(kinds)).index(kind) for kind in kinds)
    instances = [tuple(place for place, own in enumerate(chain) if own == kind) for kind in range(max(chain) + 1)]
    blocks = (BlockKind(kind, own[0], own, (), (), (), ()) for kind, own in enumerate(instances))
    return replace(_model(), chain=chain, kinds=tuple(blocks))


@given(kinds=st.lists(st.integers(0, 6), min_size=1, max_size=24), stages=st.integers(1, 30))
def test_every_number_of_stages_up_to_that_of_blocks_is_cut(kinds: list[int], stages: int) -> None:
    """No stage is empty and none is lost; more stages than blocks are one error that says how many there may be."""
    folded = _chain(kinds)

    if stages > len(kinds):
        with pytest.raises(TacticError, match=f"cannot be cut into {stages} stages") as caught:
            even_blocks(folded, stages)
        assert caught.value.hint == f"use at most {len(kinds)} stages"
        return
    counts = even_blocks(folded, stages)

    assert len(counts) == stages
    assert min(counts) >= 1
    assert sum(counts) == len(kinds)


@given(before=st.integers(0, 1), number=st.integers(2, 40), after=st.integers(0, 1), stages=st.integers(1, 20))
def test_layers_are_dealt_out_where_there_are_enough(before: int, number: int, after: int, stages: int) -> None:
    """In a row, with at most one block at each end: as `even_layers` says, and what surrounds them at the ends."""
    folded = _chain([0] * before + [1] * number + [2] * after)

    if number >= 2 * stages:
        wanted = list(even_layers(number, stages))
        wanted[0] += before
        wanted[-1] += after
        assert even_blocks(folded, stages) == tuple(wanted)
        assert max(wanted) - min(wanted) <= 3


@given(kinds=st.lists(st.integers(0, 3), min_size=1, max_size=12), own=st.lists(st.integers(-2, 6), max_size=8))
def test_layers_by_hand_are_cut_or_refused(kinds: list[int], own: list[int]) -> None:
    """Whatever is given: no stage is empty, and an error is one that explains itself."""
    folded = _chain(kinds)

    with suppress(TacticError):
        counts = blocks_per_stage(folded, [*own, len(layers(folded)) - sum(own)])

        assert min(counts) >= 1
        assert sum(counts) == len(kinds)


def test_blocks_are_dealt_out_where_layers_are_too_few() -> None:
    """29 of the 35 blocks of a small Wide-ResNet are layers: with 32 stages, three of the stages have two blocks."""
    folded = open_workload("zoo:wide-resnet-13b", dims=spec("wide-resnet-13b").tiny).folded(2)

    assert (folded.num_blocks, len(layers(folded))) == (35, 29)
    assert even_blocks(folded, 32) == (1,) * 14 + (2, 2, 2) + (1,) * 15
    assert even_blocks(_chain([0, 0, 0, 0, 0]), 4) == (1, 2, 1, 1)
