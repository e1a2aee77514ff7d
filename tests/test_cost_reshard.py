"""Changes of placement: paths move the data they claim to move, and their costs obey the laws of distances."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from autopar.cluster import load_cluster
from autopar.cost import Collective, CostModel, Move, Resharder, Reshards, reshards
from autopar.errors import ShardingError
from autopar.sharding import Mesh, Partial, Placement, Placements, Replicate, Shard, fits, format_placements

COST = CostModel(load_cluster("h100"))
R, P = Replicate(), Partial()
MESH = Mesh.of(dp=4, tp=2)

Blocks = dict[tuple[int, ...], NDArray[np.float64]]
"""Local block by device coordinates."""


@st.composite
def tables(draw: st.DrawFn) -> Reshards:
    """Return the reshards of a small tensor on a mesh of one to three axes."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    mesh = Mesh.of(**{f"axis{index}": size for index, size in enumerate(sizes)})
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 6, 12, 24]), min_size=0, max_size=3)))
    return reshards(shape, draw(st.sampled_from([2.0, 4.0, 1e6])), mesh, COST)


def placements_of(table: Reshards) -> list[Placements]:
    """Return every placement that fits the tensor."""
    single: list[Placement] = [R, P, *(Shard(dim) for dim in range(len(table.shape)))]
    every = product(single, repeat=len(table.mesh.axes))
    return [placements for placements in every if fits(table.shape, placements, table.mesh)]


def distribute(whole: NDArray[np.float64], placements: Placements, mesh: Mesh) -> Blocks:
    """Return each device's block; of a partial tensor device i of n holds (2 i + 1) / n^2 of it, which sum to one."""
    blocks = {}
    for place in product(*(range(size) for size in mesh.shape)):
        block = whole
        for placement, axis, index in zip(placements, mesh.axes, place, strict=True):
            match placement:
                case Shard(dim):
                    block = np.split(block, axis.size, axis=dim)[index]
                case Partial():
                    block = block * (2 * index + 1) / axis.size**2
                case Replicate():
                    pass
        blocks[place] = block
    return blocks


def apply(move: Move, blocks: Blocks, mesh: Mesh) -> Blocks:
    """Return what each device holds after a collective, from what the devices of its group held before."""
    size = mesh.shape[move.axis]
    moved = {}
    for place in blocks:
        mine = place[move.axis]
        group = [blocks[(*place[: move.axis], other, *place[move.axis + 1 :])] for other in range(size)]
        match move.collective, move.source, move.target:
            case None, Replicate(), Shard(dim):
                moved[place] = np.split(group[mine], size, axis=dim)[mine]
            case Collective.ALL_GATHER, Shard(dim), Replicate():
                moved[place] = np.concatenate(group, axis=dim)
            case Collective.ALL_TO_ALL, Shard(dim), Shard(other):
                moved[place] = np.concatenate([np.split(block, size, axis=other)[mine] for block in group], axis=dim)
            case Collective.ALL_REDUCE, Partial(), Replicate():
                moved[place] = np.sum(group, axis=0)
            case Collective.REDUCE_SCATTER, Partial(), Shard(dim):
                moved[place] = np.split(np.sum(group, axis=0), size, axis=dim)[mine]
            case _:
                raise AssertionError(f"{move} is no move")
    return moved


@given(table=tables(), data=st.data())
def test_paths_bring_every_block_to_its_place(table: Reshards, data: st.DataObject) -> None:
    """Executing the moves on real blocks gives exactly the blocks of the target, at the stated bytes and seconds."""
    places = placements_of(table)
    source, target = data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))
    seconds = table.matrix([source], [target])[0, 0]
    if np.isinf(seconds):
        with pytest.raises(ShardingError, match="cannot go from"):
            table.path(source, target)
        return
    whole = np.arange(float(np.prod(table.shape))).reshape(table.shape)

    moves = table.path(source, target)

    blocks = distribute(whole, source, table.mesh)
    for move in moves:
        blocks = apply(move, blocks, table.mesh)
    expected = distribute(whole, target, table.mesh)
    for place, block in blocks.items():
        np.testing.assert_allclose(block, expected[place])
    assert sum(move.seconds for move in moves) == pytest.approx(seconds)


@given(table=tables())
def test_costs_are_distances(table: Reshards) -> None:
    """Staying is free, detours never pay, and there and back is free only between placements that hold the same."""
    places = placements_of(table)

    seconds = table.matrix(places, places)

    assert np.all(np.diag(seconds) == 0.0)
    for middle in range(len(places)):
        detour = seconds[:, middle, None] + seconds[None, middle, :]
        assert np.all(seconds <= detour * (1 + 1e-9))
    if all(size > 1 for size in table.mesh.shape):
        there_and_back = seconds + seconds.T
        assert np.all(there_and_back[~np.eye(len(places), dtype=bool)] > 0.0)


@given(table=tables())
def test_nothing_becomes_partial(table: Reshards) -> None:
    places = placements_of(table)

    seconds = table.matrix(places, places)

    for (i, source), (j, target) in product(enumerate(places), repeat=2):
        created = any(b == P != a for a, b in zip(source, target, strict=True))
        assert np.isinf(seconds[i, j]) == created


@given(table=tables())
def test_placements_that_do_not_fit_cannot_be_reached(table: Reshards) -> None:
    single: list[Placement] = [R, P, *(Shard(dim) for dim in range(len(table.shape)))]
    for placements in product(single, repeat=len(table.mesh.axes)):
        row = np.array([table.index(placements)])
        assert np.isfinite(table.between(row, row)) == fits(table.shape, placements, table.mesh)


@given(factor=st.floats(1.0, 1e6), other=st.sampled_from([(8, 12), (24,), (4, 8, 12)]))
def test_more_bytes_never_cost_less(factor: float, other: tuple[int, ...]) -> None:
    small = reshards(other, 2.0, MESH, COST)
    large = reshards(other, 2.0 * factor, MESH, COST)

    finite = np.isfinite(small.seconds)

    assert np.array_equal(finite, np.isfinite(large.seconds))
    assert np.all(large.seconds[finite] >= small.seconds[finite])


@pytest.mark.parametrize(
    ("rows", "source", "target", "moves"),
    [
        (1024, (R, R), (Shard(0), Shard(0)), ["slice[0] R->S(0)", "slice[1] R->S(0)"]),
        (1024, (P, R), (R, R), ["all_reduce[0] P->R"]),
        (1024, (R, P), (R, Shard(1)), ["reduce_scatter[1] P->S(1)"]),
        (1024, (R, Shard(0)), (R, Shard(1)), ["all_to_all[1] S(0)->S(1)"]),
        (1024, (Shard(0), R), (R, R), ["all_gather[0] S(0)->R"]),
        (1024, (P, P), (R, R), ["all_reduce[0] P->R", "all_reduce[1] P->R"]),
        # of a large tensor one axis scatters, so that the other has a quarter to reduce
        (65536, (P, P), (R, R), ["reduce_scatter[0] P->S(0)", "all_reduce[1] P->R", "all_gather[0] S(0)->R"]),
        # the minor axis lets go of the dim before the major one can join it
        (
            64,
            (Shard(0), Shard(0)),
            (R, Shard(0)),
            ["all_gather[1] S(0)->R", "all_gather[0] S(0)->R", "slice[1] R->S(0)"],
        ),
    ],
)
def test_the_cheapest_way_is_the_one_worked_out_by_hand(
    rows: int, source: Placements, target: Placements, moves: list[str]
) -> None:
    table = reshards((rows, 1024), 2.0, MESH, COST)

    assert [str(move) for move in table.path(source, target)] == moves


def test_bytes_are_local_given_the_other_axes() -> None:
    """A 1024 x 1024 tensor of 2 bytes over 4 x 2: gathering halves of quarters makes quarters, 524,288 bytes."""
    table = reshards((1024, 1024), 2.0, MESH, COST)

    (move,) = table.path((Shard(0), Shard(1)), (Shard(0), R))

    assert move.nbytes == 1024 * 1024 * 2 / 4
    assert move.seconds == COST.collective_seconds("all_gather", move.nbytes, MESH.axes[1])
    assert table.path((R, R), (Shard(0), R))[0].nbytes == 0.0


def test_partial_sums_and_partial_maxima_are_different_placements() -> None:
    table = reshards((8, 8), 4.0, Mesh.of(tp=2), COST)
    maxima = (Partial("max"),)

    seconds = table.matrix([(P,), maxima], [(P,), maxima, (R,)])

    assert np.isfinite(seconds).tolist() == [[True, False, True], [False, True, True]]
    assert table.path(maxima, (R,))[0].source == Partial("max")


def test_a_dim_in_chunks_moves_like_any_other_where_every_chunk_can_be_split() -> None:
    """24 columns in 3 chunks of 8 go over 4 x 2 devices, 12 in chunks of 4 over either axis alone."""
    many, few = (reshards((8, columns), 4.0, MESH, COST, (1, 3)) for columns in (24, 12))
    third = Shard(1, chunks=3)

    assert np.isfinite(many.matrix([(third, third)], [(R, R)])).all()
    assert np.isinf(few.matrix([(third, third)], [(R, R)])).all()
    assert np.isfinite(few.matrix([(third, R), (R, third)], [(R, R)])).all()
    (move,) = few.path((P, R), (third, R))
    assert (move.collective, move.target) == (Collective.REDUCE_SCATTER, third)
    plain = reshards((8, 24), 4.0, MESH, COST)
    np.testing.assert_array_equal(many.seconds, plain.seconds)


@pytest.mark.parametrize("placements", [(R,), (Shard(2), R), (R, R, R)])
def test_placements_of_other_tensors_are_refused(placements: Placements) -> None:
    with pytest.raises(ShardingError, match="is no placement of a") as caught:
        reshards((8, 8), 4.0, MESH, COST).index(placements)

    assert format_placements(placements) in str(caught.value)


def test_a_placement_reads_as_a_number_major_axis_first() -> None:
    """R is digit 0, P 1, S(d) d + 2, in base rank + 2: for a matrix P, S(1) is 1 x 4 + 3."""
    table = reshards((8, 8), 2.0, MESH, COST)

    assert [table.index(placements) for placements in ((R, R), (P, Shard(1)), (Shard(1), R))] == [0, 7, 12]


def test_states_are_numbered_alike_for_all_tensors_of_a_rank() -> None:
    """Formulation looks a placement up once per rank, not once per tensor."""
    one, other = (reshards(shape, 2.0, MESH, COST) for shape in ((8, 8), (7, 100)))

    single: list[Placement] = [R, P, Shard(0), Shard(1)]
    for placements in product(single, repeat=2):
        assert one.index(placements) == other.index(placements)


def test_a_resharder_computes_each_shape_once() -> None:
    resharder = Resharder(MESH, COST)

    assert resharder.of((8, 8), 2.0) is resharder.of((8, 8), 2.0)
    assert resharder.of((8, 8), 2.0) is not resharder.of((8, 8), 4.0)
