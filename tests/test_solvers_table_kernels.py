"""Table kernels agree with numpy, for any memory layout."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.solvers.model import table_kernels
from autopar.solvers.model.graphical_model import Field
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.model.table_kernels import BY_COLUMNS, BY_ROWS, SAME_COLUMNS, SAME_ROWS, VARIED, Floats
from autopar.solvers.reductions.dominance import undominated


@st.composite
def tables(draw: st.DrawFn, rows: int | None = None, columns: int | None = None) -> Floats:
    """Few distinct costs, so that equal lines and forbidden entries are frequent; sometimes a separable table."""
    shape = rows or draw(st.integers(1, 4)), columns or draw(st.integers(1, 4))
    cost = st.sampled_from([0.0, 0.125, 0.375, 1.0, -2.0, np.inf])
    found: Floats = np.array([[draw(cost) for _ in range(shape[1])] for _ in range(shape[0])])
    match draw(st.integers(0, 3)):
        case 0:
            found = found[:, :1] + np.where(np.isinf(found[:1]), 0.0, found[:1])
        case 1:
            found = np.repeat(found[:1], shape[0], axis=0)
    return np.asfortranarray(found) if draw(st.booleans()) else found


@given(tables())
def test_equal_lines_are_those_of_numpy(table: Floats) -> None:
    """Rows have precedence: a constant table depends on neither node."""
    rows = bool((table == table[:1]).all())
    columns = bool((table == table[:, :1]).all())

    assert table_kernels.same_lines(table) == (SAME_ROWS if rows else SAME_COLUMNS if columns else VARIED)


@given(tables(), st.sampled_from([0.0, 0.7, 3.0]))
def test_weights_keep_forbidden_entries(table: Floats, weight: float) -> None:
    """Under weight 0 as well; every other entry is the product."""
    finite = np.isfinite(table)
    expected = np.where(finite, np.where(finite, table, 0.0) * weight, np.inf)

    assert np.array_equal(table_kernels.weighted(table, weight), expected)
    assert table_kernels.is_finite(table.ravel()) == bool(finite.all())


@given(st.lists(tables(), min_size=1, max_size=3), st.booleans())
def test_extremes_are_sums_of_the_least_and_the_greatest_permitted(costs: list[Floats], joined: bool) -> None:
    """Where no entry is permitted the maximum is 0, the sum over nothing."""
    nodes = [own[:, 0] for own in costs] + [np.zeros(0)]
    field = Field([*nodes, np.zeros(3), np.zeros(2)], constant=0.25)
    table = np.array([[0.0, 1.0], [2.0, np.inf], [0.5, 0.125]])
    if joined:
        field.add(len(costs) + 1, len(costs) + 2, table)

    every = [*(own for own in nodes if len(own)), *([table] if joined else [])]
    permitted = [own[np.isfinite(own)] for own in every]
    assert field.lowest_cost() == 0.25 + sum(float(own.min()) for own in every)
    assert field.highest_cost() == 0.25 + sum(float(own.max()) for own in permitted if own.size)
    assert [own.tolist() for own in field.permitted()] == [np.flatnonzero(np.isfinite(u)).tolist() for u in field.unary]


@given(tables(), st.data())
def test_a_part_has_the_given_rows_and_columns(table: Floats, data: st.DataObject) -> None:
    """In the given order, with repetitions."""
    rows, columns = (
        np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=5)), np.int64) for size in table.shape
    )

    assert np.array_equal(table_kernels.part(table, rows, columns), table[np.ix_(rows, columns)])


@given(tables())
def test_a_table_is_functional_if_each_line_permits_one_entry(table: Floats) -> None:
    """Every line must permit exactly one entry."""
    finite = np.isfinite(table)
    rows, columns = bool((finite.sum(axis=1) == 1).all()), bool((finite.sum(axis=0) == 1).all())

    assert table_kernels.functional_sides(table) == BY_ROWS * rows + BY_COLUMNS * columns


@given(tables())
def test_a_table_is_separable_if_row_and_column_costs_add_up_to_it(table: Floats) -> None:
    """Exactly: row minima, and the column minima of the remainder."""
    rows, columns = np.full(table.shape[0], np.nan), np.full(table.shape[1], np.nan)
    least = table.min(axis=1)
    bare = bool(np.isfinite(least).all())
    left = (table - least[:, None]).min(axis=0) if bare else np.full(table.shape[1], np.inf)
    adds_up = bare and bool(np.isfinite(left).all()) and np.array_equal(least[:, None] + left[None, :], table)

    assert table_kernels.separate(table, rows, columns) == adds_up
    if adds_up:
        assert np.array_equal(rows, least)
        assert np.array_equal(columns, left)


@given(st.data())
def test_the_min_sum_product_minimises_over_the_labels_of_a_node(data: st.DataObject) -> None:
    """For either orientation of its tables."""
    count: Any = data.draw(st.integers(1, 4))
    first, second = data.draw(tables(rows=count)), data.draw(tables(rows=count))
    unary = data.draw(tables(rows=count, columns=1))[:, 0]
    turned, turned_too = data.draw(st.booleans()), data.draw(st.booleans())

    found = table_kernels.min_sum_product(
        unary,
        np.ascontiguousarray(first.T) if turned else first,
        turned,
        np.ascontiguousarray(second.T) if turned_too else second,
        turned_too,
    )

    assert np.array_equal(found, ((first + unary[:, None])[:, :, None] + second[:, None, :]).min(axis=0))


@st.composite
def fields(draw: st.DrawFn) -> Field:
    """A few nodes, most of them joined by tables."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    unary = [np.minimum(draw(tables(rows=size, columns=1))[:, 0], 2.0) for size in sizes]
    found = Field(unary)
    for b in range(len(sizes)):
        for a in range(b):
            if draw(st.booleans()):
                table = np.ascontiguousarray(draw(tables(rows=sizes[a], columns=sizes[b])))
                if table_kernels.same_lines(table) == VARIED:
                    found.add(a, b, table)
    return found


@given(fields())
def test_a_label_is_dominated_only_if_another_is_never_dearer(field: Field) -> None:
    """Compared over all kept labels of the neighbours."""
    before = [np.arange(len(unary)) for unary in field.unary]
    for i, unary in enumerate(field.unary):
        lines = [field.table(i, other)[:, before[other]] for other in sorted(field.adjacent[i])]
        beats = np.zeros((len(unary), len(unary)), bool)
        for t in range(len(unary)):
            for s in range(len(unary)):
                counted = [(line, np.isfinite(line[t])) for line in lines]
                rises = [(line[s, own] - line[t, own]).max(initial=-np.inf) for line, own in counted]
                is_infeasible = any(np.isposinf(rise) for rise in rises)
                beats[t, s] = s != t and not is_infeasible and unary[s] - unary[t] + sum(rises) <= 0
        left = set(range(len(unary)))
        for t in range(len(unary)):
            if any(beats[t, s] for s in left):
                left.discard(t)
        before[i] = np.array(sorted(left), np.int64)

    kept = undominated(field, Memory.unlimited())

    assert [own.tolist() for own in kept] == [expected.tolist() for expected in before]
