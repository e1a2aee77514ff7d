"""Folding: a chain of blocks by its distinct ones, nothing lost and nothing counted twice."""

from collections import Counter

import pytest

from autopar.folding.fold import Source, boundary_groups, fold
from autopar.ir.graph import Op, Phase, Role
from tests.formulations import DIMS, folded

CASES = [(name, mode) for name in DIMS for mode in ("train", "infer")]


def _members(name: str, mode: str) -> list[list[Op]]:
    """Return the ops of every block of the unfolded graph."""
    found = folded(name, mode)
    members: list[list[Op]] = [[] for _ in found.chain]
    for op in found.graph.ops:
        members[op.block].append(op)
    return members


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_instances_tile_the_chain(name: str, mode: str) -> None:
    """Every block is an instance of one kind, and the representative is one of them."""
    found = folded(name, mode)

    by_instance = {index: kind.id for kind in found.kinds for index in kind.instances}

    assert tuple(by_instance[index] for index in range(found.num_blocks)) == found.chain
    assert sum(kind.count for kind in found.kinds) == found.num_blocks
    assert all(kind.representative in kind.instances for kind in found.kinds)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_positions_correspond(name: str, mode: str) -> None:
    """Op j of an instance is op j of the representative: kind, attributes, phase and all shapes."""
    found, members = folded(name, mode), _members(name, mode)

    def signature(op: Op) -> tuple[object, ...]:
        shapes = [found.graph.values[value].shape if value else None for value in (*op.inputs, *op.outputs)]
        return op.kind, op.attrs, op.phase, shapes

    for kind in found.kinds:
        expected = [signature(op) for op in kind.ops]
        for index in kind.instances:
            assert [signature(op) for op in members[index]] == expected


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_counts_add_up_to_the_unfolded_graph(name: str, mode: str) -> None:
    """Ops, parameters and uses, each with its count, are those of the graph."""
    found = folded(name, mode)
    graph = found.graph
    own = {state.input for state in graph.states if state.role is not Role.BUFFER}

    uses = Counter[bool]()
    for op in graph.ops:
        for value in op.inputs:
            if value and value in found.by_value and not (op.phase is Phase.UPDATE and value in own):
                uses[found.by_value[value].source is Source.OP] += 1

    assert sum(kind.count * len(kind.ops) for kind in found.kinds) == len(graph.ops)
    assert sum(parameter.count for parameter in found.parameters) == sum(s.role is Role.PARAMETER for s in graph.states)
    assert sum(use.count for use in found.uses if use.producer.source is Source.OP) == uses[True]
    assert sum(use.count for use in found.uses if use.producer.source is Source.STATE) == uses[False]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_crossing_value_has_one_boundary(name: str, mode: str) -> None:
    """What defines a value that another block reads is in one group, with every arrival it can meet."""
    found = folded(name, mode)

    group_of: dict[object, int] = {}
    for number, (producers, _) in enumerate(boundary_groups(found)):
        for producer in producers:
            assert producer not in group_of
            group_of[producer] = number

    crossing = {use.producer for use in found.uses if use.crossing and use.producer.source is Source.OP}
    assert set(group_of) == crossing
    for number, (_, arrivals) in enumerate(boundary_groups(found)):
        for _, arrival in arrivals:
            assert {group_of[producer] for producer, _ in arrival.producers} == {number}


def test_a_transformer_is_three_blocks() -> None:
    """First, middle and last; the four layers of the middle are one."""
    found = folded("gpt2")

    assert found.chain == (0, 1, 1, 1, 1, 2)
    assert [kind.count for kind in found.kinds] == [1, 4, 1]


def test_tied_parameters_count_once() -> None:
    """GPT-2 reads its token embedding in the first and in the last block; it belongs to the first."""
    found = folded("gpt2")

    tied = [p for p in found.parameters if len({u.consumer.kind for u in found.uses if u.producer == p.producer}) > 1]

    assert [(parameter.producer.kind, parameter.count) for parameter in tied] == [(0, 1)]


@pytest.mark.parametrize("name", DIMS)
def test_inference_saves_nothing(name: str) -> None:
    """Only a backward pass needs values of its own forward."""
    kinds = folded(name, "infer").kinds

    assert not any(any(flags) for kind in kinds for flags in kind.saved)
    assert not any(arrival.saved for kind in kinds for arrival in kind.arrivals)


@pytest.mark.parametrize("name", DIMS)
def test_saved_values_are_read_by_the_backward(name: str) -> None:
    """A saved value, or a view of it, is an input of a backward op of the same block."""
    found = folded(name)
    consumers = found.graph.consumers()

    def read_by_backward(value: str, block: int) -> bool:
        readers = consumers.get(value, [])
        return any(
            (reader.phase is Phase.BACKWARD and reader.block == block)
            or (reader.kind in ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity")
                and any(read_by_backward(output, block) for output in reader.outputs if output))
            for reader in readers
        )  # fmt: skip

    for kind in found.kinds:
        for op, flags in zip(kind.ops, kind.saved, strict=True):
            for value, saved in zip(op.outputs, flags, strict=True):
                if saved:
                    assert op.phase in (Phase.FORWARD, Phase.LOSS)
                    assert read_by_backward(value, kind.representative), value


def test_folding_twice_gives_the_same() -> None:
    """Order of kinds, parameters and uses depends on nothing but the graph."""
    found = folded("gpt2")

    again = fold(found.graph)

    assert (again.chain, again.kinds, again.parameters, again.uses) == (
        found.chain, found.kinds, found.parameters, found.uses,
    )  # fmt: skip
