"""Tensors on a mesh: blocks tile them, and moving blocks is the same as gathering and splitting again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ProgramError
from autopar.program.records import Start
from autopar.ranks import collectives
from autopar.runtime.blocks import block_starts, exchange, gather, join, move, scatter, split
from autopar.sharding import REDUCTIONS, Mesh, Partial, Placement, Replicate, Shard, local_shape, own_shape

MESH = Mesh.of(outer=2, middle=3, inner=2)
ARRAY = np.random.default_rng(0).normal(size=(12, 24, 5))


@st.composite
def placements(draw: st.DrawFn, count: int) -> list[Placement]:
    """Draw a placement per mesh axis; all partial ones are of one kind, as only these can be reduced in any order."""
    partial = Partial(draw(st.sampled_from(REDUCTIONS)))
    one: st.SearchStrategy[Placement] = st.sampled_from([Replicate(), Shard(0), Shard(1, 2), partial])
    return draw(st.lists(one, min_size=count, max_size=count))


@given(drawn=placements(3))
def test_gather_is_the_inverse_of_scatter(drawn: list[Placement]) -> None:
    """And every block has the local shape."""
    blocks = scatter(ARRAY, tuple(drawn), MESH)

    assert len(blocks) == MESH.size
    assert {block.shape for block in blocks} == {local_shape(ARRAY.shape, tuple(drawn), MESH)}
    np.testing.assert_allclose(gather(blocks, tuple(drawn), MESH), ARRAY, rtol=1e-14)


@given(drawn=placements(4), axis=st.integers(0, 2))
def test_moving_changes_the_placement_on_one_axis(drawn: list[Placement], axis: int) -> None:
    """As long as no later axis splits the same dim, which is the law of reshards."""
    *before, target = drawn
    later = before[axis + 1 :]
    if any(isinstance(p, Shard) and p in later for p in (before[axis], target)):
        return
    reached = (*before[:axis], target, *later)

    blocks = move(scatter(ARRAY, tuple(before), MESH), axis, before[axis], target, MESH)

    np.testing.assert_allclose(gather(blocks, reached, MESH), ARRAY, rtol=1e-14)


def test_a_dim_split_twice_is_split_by_the_major_axis_first() -> None:
    blocks = scatter(np.arange(8), (Shard(0), Replicate(), Shard(0)), Mesh.of(outer=2, middle=1, inner=2))

    assert [block.tolist() for block in blocks] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_chunks_are_split_each_by_itself() -> None:
    """Of queries, keys and values side by side, every device gets its share of each; two axes split it further."""
    one = scatter(np.arange(12), (Shard(0, 3),), Mesh.of(tp=2))
    two = scatter(np.arange(12), (Shard(0, 3), Shard(0, 3)), Mesh.of(outer=2, inner=2))

    assert [block.tolist() for block in one] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert [block.tolist() for block in two] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [("sum", 6), ("mean", 2), ("max", 3), ("min", 1), ("prod", 6), ("logsumexp", np.log(np.exp([1, 2, 3]).sum()))],
)
def test_terms_are_put_together_by_their_reduction(reduce: str, expected: float) -> None:
    terms = [np.array([number]) for number in (1.0, 2.0, 3.0)]

    np.testing.assert_allclose(gather(terms, (Partial(reduce),), Mesh.of(tp=3)), [expected], rtol=1e-15)


def test_a_halo_of_whole_numbers_has_a_lowest_one_too() -> None:
    blocks = exchange([np.array([1, 2]), np.array([3, 4])], 0, 0, (1, 0), "lowest", Mesh.of(tp=2))

    assert [block.tolist() for block in blocks] == [[np.iinfo(np.int64).min, 1, 2], [2, 3, 4]]


def test_a_halo_does_not_reach_beyond_the_neighbour() -> None:
    with pytest.raises(ProgramError, match="blocks of 1 rows are asked for 2 of them"):
        exchange([np.array([1]), np.array([2])], 0, 0, (2, 0), "zero", Mesh.of(tp=2))


def test_equal_blocks_are_one_object() -> None:
    """Copies cost nothing, and the executor runs equal work once."""
    blocks = scatter(ARRAY, (Shard(0), Replicate(), Replicate()), MESH)

    assert len({id(block) for block in blocks}) == 2


def test_copies_that_differ_are_an_error() -> None:
    """A difference of rounding is none, any other is; whole numbers are compared exactly."""
    mesh, replicated = Mesh.of(tp=2), (Replicate(),)

    assert gather([np.ones(2), np.ones(2) * (1 + 1e-15)], replicated, mesh).tolist() == [1, 1]
    assert gather([np.ones(2, np.float32), np.ones(2, np.float32) * (1 + 1e-6)], replicated, mesh).tolist() == [1, 1]
    for first, second in ((np.ones(2), np.array([1.0, 1.1])), (np.array([1]), np.array([2]))):
        with pytest.raises(ProgramError, match="copies of one tensor hold different values"):
            gather([first, second], replicated, mesh)


@pytest.mark.parametrize(("fill", "outside"), [("zero", 0.0), ("lowest", -np.inf)])
def test_blocks_with_rows_of_their_neighbours_are_windows_of_the_padded_tensor(fill: str, outside: float) -> None:
    """Device i of n holds rows from i x size on, one of the previous and two of the next; copies stay one object."""
    placements = (Replicate(), Shard(1), Shard(0))
    padded = np.pad(ARRAY, ((0, 0), (1, 2), (0, 0)), constant_values=outside)

    blocks = exchange(scatter(ARRAY, placements, MESH), 1, 1, (1, 2), fill, MESH)

    windows = [padded[:, 8 * i : 8 * i + 11] for i in range(3)]
    wanted = [window[half] for window in windows for half in (slice(0, 6), slice(6, 12))] * 2
    assert all(np.array_equal(block, window) for block, window in zip(blocks, wanted, strict=True))
    assert len({id(block) for block in blocks}) == 6


def test_devices_know_where_their_block_starts() -> None:
    """A dim of 24 rows split by the outer axis first, then by the inner one; the middle axis holds copies."""
    outer, _, inner = MESH.axes

    starts = block_starts(Start((outer, inner), rows=6), MESH)

    assert [int(start) for start in starts] == [0, 6, 0, 6, 0, 6, 12, 18, 12, 18, 12, 18]
    assert {start.dtype for start in starts} == {np.dtype(np.int64)}


def test_a_dim_that_does_not_divide_is_dealt_unevenly() -> None:
    """Ten rows over four devices are blocks of three and a last one of one row; ranks pad it while it travels."""
    whole, placement = np.arange(20).reshape(10, 2), Shard(0, whole=10)

    blocks = split(whole, placement, 4)

    assert [len(block) for block in blocks] == [3, 3, 3, 1]
    assert blocks[3].tolist() == [[18, 19]]
    assert [own_shape((3, 2), (placement,), Mesh.of(axis=4), rank) for rank in range(4)] == [b.shape for b in blocks]
    assert (join(blocks, placement) == whole).all()
    pieces = collectives.split(whole, placement, 4)
    assert pieces.shape == (4, 3, 2)
    assert (pieces[:3] == np.stack(blocks[:3])).all()
    assert (collectives.merge(pieces, placement) == whole).all()
