"""The problem record, its checker and its file form."""

import gzip
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import iopddl, solvers
from autopar.errors import ProblemError
from autopar.problem import FORBIDDEN, Limit, Problem, Solution, Termination, Usage, check, check_together, relative_gap
from tests.checks import close
from tests.strategies import problems

DATA = Path(__file__).parents[2] / "shared" / "data" / "iopddl"


def instance(name: str) -> Problem:
    """Return a contest instance, or skip."""
    if not (DATA / name).exists():
        pytest.skip(f"the instance {name} is not beside the repository")
    return iopddl.load(DATA / name)


def small(**changes: Any) -> Problem:
    """Return two nodes that cost 2 together at best, with what a test changes."""
    arguments: dict[str, Any] = {"node_costs": [[1, 2], [3, 0]], "edges": [(0, 1, [[0, 9], [9, 0]])]} | changes
    return Problem.build(**arguments)


def test_totals_beyond_64_bits_are_exact() -> None:
    """Twelve nodes of 9e17 and one of 1 cost 10_800_000_000_000_000_001, which neither int64 nor float64 holds."""
    problem = Problem.build([[9 * 10**17]] * 12 + [[1]])

    assert problem.cost((0,) * 13) == 10_800_000_000_000_000_001


def test_float_totals_are_correctly_rounded() -> None:
    """1 + 10 * 1e-16 is 1.000000000000001; adding one after another would lose every small term."""
    problem = Problem.build([[1.0]] + [[1e-16]] * 10)

    assert problem.cost((0,) * 11) == 1.000000000000001


def test_a_weight_of_zero_keeps_forbidden_pairs_forbidden() -> None:
    problem = small(edges=[(0, 1, [[0.0, math.inf], [math.inf, 5.0]], 0.0)])

    assert problem.cost((0, 1)) == math.inf
    assert problem.cost((1, 1)) == 2.0


def test_equal_tables_are_stored_once() -> None:
    table = np.array([[0, 9], [9, 0]])

    problem = Problem.build([[0, 0]] * 3, [(0, 1, table), (1, 2, table.copy(), 3), (0, 2, table)])

    assert len(problem.edge_tables) == 1
    assert problem.cost((0, 1, 1)) == 9 + 0 + 9


def test_use_is_counted_over_half_open_intervals() -> None:
    """Node 0 uses 4 in [0, 3) and 2 in [5, 6), node 1 3 in [2, 5): 4, 7 from 2, 3 from 3, 2 from 5, 0 from 6."""
    usages = [
        Usage(0, 0, 3, np.array([4, 0])),
        Usage(0, 5, 6, np.array([2, 0])),
        Usage(1, 2, 5, np.array([3, 0])),
        Usage(1, 4, 4, np.array([99, 99])),
    ]

    problem = small(usages=usages, limit=7)

    assert problem.usage((0, 0)) == ((0, 4), (2, 7), (3, 3), (5, 2), (6, 0))
    assert problem.peak_usage((0, 0)) == 7
    assert problem.fits((0, 0))
    assert not replace(problem, limits=(Limit(6, 0, 9),)).fits((0, 0))
    assert replace(problem, limits=(Limit(6, 3, 9), Limit(4, 0, 2))).fits((0, 0))


def test_a_limit_holds_within_its_interval_only() -> None:
    """Use of 4 in [0, 3): a limit of 3 over [3, 9) does not see it, one over [2, 9) is broken by 1."""
    problem = small(usages=[Usage(0, 0, 3, np.array([4, 0]))])

    assert replace(problem, limits=(Limit(3, 3, 9),)).excess((0, 0)) == 0
    assert replace(problem, limits=(Limit(3, 2, 9),)).excess((0, 0)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_costs": [[1, 2], []]}, r"node 1 has costs of shape \(0,\)"),
        ({"node_costs": [[1, 2], [math.nan, 0]]}, "not a number"),
        ({"edges": [(0, 2, [[0, 9], [9, 0]])]}, "an edge names node 2, there are 2"),
        ({"edges": [(0, 1, [[0, 9]])]}, r"table of shape \(1, 2\), its nodes 0 and 1 have 2 and 2 strategies"),
        ({"edges": [(1, 1, [[0, 9], [9, 0]])]}, "joins node 1 with itself"),
        ({"edges": [(0, 1, [[0, 9], [9, 0]], -1)]}, "weight that is negative"),
        ({"usages": [Usage(0, 0, 1, np.array([1]))]}, r"a usage of node 0 has \(1,\) amounts"),
        ({"usages": [Usage(0, 0, 1, np.array([-1, 0]))]}, "no finite numbers >= 0"),
        ({"limit": math.nan}, "a limit that is not a number"),
        ({"node_names": ["a"]}, "1 names for 2 nodes"),
        ({"node_costs": [[10**19], [0, 0]], "edges": []}, "too large for 64 bits"),
        ({"node_costs": [["fast", "slow"], [0, 0]]}, "no numbers"),
    ],
)
def test_a_malformed_problem_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        small(**changes)


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        (Solution(Termination.OPTIMAL, (1, 1), 1, 1), "claims cost 1, its choice costs 2"),
        (Solution(Termination.OPTIMAL, (0, 0), 4, 2), "claims to be optimal with a gap of 50.00%"),
        (Solution(Termination.FEASIBLE, (1, 1), 2, 3), "claims bound 3, above its own cost 2"),
        (Solution(Termination.FEASIBLE, (0, 1), 10, 0), "exceeds a limit by 2"),
        (Solution(Termination.INFEASIBLE, (1, 1), 2, 2), "claims to be infeasible but has a choice"),
        (Solution(Termination.OPTIMAL, None, math.inf, 2), "claims to be optimal but has no choice"),
        (Solution(Termination.INFEASIBLE, None, math.inf, 2), "its bound is 2, not infinity"),
        (Solution(Termination.UNKNOWN, None, 5, 2), "has cost 5 but no choice"),
        (Solution(Termination.FEASIBLE, (1, 2), 2, 0), "strategy 2 of node 1, which has 2"),
        (Solution(Termination.FEASIBLE, (1,), 2, 0), "a choice of 1 strategies for 2 nodes"),
    ],
)
def test_the_checker_finds_every_false_claim(solution: Solution, message: str) -> None:
    """Choice (0, 1) uses 1 + 6, two more than the limit; (1, 1) costs 2 and uses 0 + 5."""
    usages = [Usage(0, 0, 2, np.array([1, 0])), Usage(1, 1, 3, np.array([0, 5])), Usage(1, 1, 2, np.array([0, 0]))]
    problem = small(usages=[*usages, Usage(0, 1, 2, np.array([1, 0]))], limit=5)
    check(problem, Solution(Termination.OPTIMAL, (1, 1), 2, 2))

    with pytest.raises(ProblemError, match=message):
        check(problem, solution)


def test_what_somebody_can_still_write_to_is_copied() -> None:
    """A view that cannot be written to may show an array that can; frozen arrays and their views are shared."""
    open_, shut = np.arange(4), np.arange(4)
    shut.flags.writeable = False
    views = [array.reshape(2, 2) for array in (open_, shut)]
    views[0].flags.writeable = False
    problem = Problem.build([[0, 0], [0, 0], [0, 0]], [(0, 1, views[0]), (1, 2, views[1] + 0), (0, 2, views[1])])

    open_[:] = 9

    assert problem.edge_tables[0].tolist() == [[0, 1], [2, 3]]
    (table,) = Problem.build([[0, 0], [0, 0]], [(0, 1, views[1])]).edge_tables
    assert np.shares_memory(table, shut)


def test_claims_of_several_solvers_are_held_against_each_other() -> None:
    """Each may be true for all that it says itself: a bound of 3 without a choice, and a choice of cost 2."""
    problem = small()
    found = Solution(Termination.FEASIBLE, (1, 1), 2, 1)
    check_together(problem, {"a": found, "b": Solution(Termination.UNKNOWN, None, math.inf, 2)})

    with pytest.raises(ProblemError, match="solver 'b' claims bound 3, solver 'a' has a choice of cost 2"):
        check_together(problem, {"a": found, "b": Solution(Termination.UNKNOWN, None, math.inf, 3)})


def test_a_gap_is_relative_to_the_cost() -> None:
    assert relative_gap(10.0, 8.0) == 0.2
    assert relative_gap(10.0, 10.0) == 0.0
    assert relative_gap(0.0, -1.0) == math.inf


@given(problem=problems())
@settings(max_examples=60)
def test_a_saved_problem_has_the_same_optimum(problem: Problem, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Clones, fillers and whole numbers change nothing: a choice for the file is one for the problem."""
    path = tmp_path_factory.mktemp("saved") / "problem.json.gz"
    iopddl.save(problem, path)

    loaded = iopddl.load(path)

    before, after = (solvers.load("auto").solve(p) for p in (problem, loaded))
    assert after.termination is before.termination
    if after.choice is not None:
        unit = 1.0 if problem.is_whole else iopddl.UNIT_SECONDS
        choice = after.choice[: problem.num_nodes]
        assert problem.fits(choice)
        assert close(problem, after.cost * unit, before.cost) or abs(after.cost * unit - before.cost) < 20 * unit


def test_the_example_of_the_contest_is_solved() -> None:
    """The contest's own example: the optimum of 445 is found by trying all 12 choices by hand."""
    problem = instance("example.json")

    solution = solvers.load("auto").solve(problem)

    assert solution == Solution(Termination.OPTIMAL, (0, 0, 2, 1, 0), 445, 445)


def test_llama_3_8b_on_256_devices_is_solved_to_a_proof() -> None:
    """1,154 nodes; the optimum is the 102,658.18956 us of AutoParallel's own solver, but for rounding to 1e-4 us."""
    problem = instance("llama3-8b-4layers-mesh32x8.json.gz")

    solution = solvers.load("auto").solve(problem, time_limit=60)

    assert solution.termination is Termination.OPTIMAL
    assert solution.cost == 1_026_581_849


def test_forbidden_costs_survive_a_file(tmp_path: Path) -> None:
    problem = small(edges=[(0, 1, [[0, FORBIDDEN], [FORBIDDEN, 4]])])

    iopddl.save(problem, tmp_path / "p.json")

    loaded = iopddl.load(tmp_path / "p.json")
    assert loaded.cost((0, 1)) == math.inf
    assert loaded.cost((1, 1)) == 6


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """And one that can be is readable by everybody."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()

    for path in (tmp_path / "file" / "p.json", tmp_path / "folder"):
        with pytest.raises(ProblemError, match="cannot write"):
            iopddl.save(small(), path)
    iopddl.save(small(), tmp_path / "new" / "p.json")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "new"]
    assert (tmp_path / "new" / "p.json").stat().st_mode & 0o777 == 0o644


def document(**changes: Any) -> bytes:
    """Return a file of one node and a pair with what a test changes."""
    body: dict[str, Any] = {
        "nodes": {"intervals": [[0, 1], [0, 1]], "costs": [[1], [1, 2]], "usages": [[1], [1, 2]]},
        "edges": {"nodes": [[0, 1]], "costs": [[5, 6]]},
        "usage_limit": 9,
    }
    for name, value in changes.items():
        section, _, key = name.partition("_")
        if key and section in body:
            body[section][key] = value
        else:
            body[name] = value
    return json.dumps({"problem": body}).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "bad.json is not JSON: Input data was truncated"),
        (b"[1, 2", "Expected `object`, got `array`"),
        (document()[:-9], "is not JSON: Input data was truncated"),
        (document().replace(b"9", b"9,]"), "is not JSON"),
        (b'{"problem": {"name": "\xff"}}', "is not JSON"),
        (gzip.compress(document(), mtime=0)[:40], "bad.json is not whole: .*\n  hint: copy the file again"),
        (gzip.compress(document(), mtime=0)[:-9] + b"123456789", "is not whole"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "Object missing required field `problem`"),
        (document(nodes=3), "problem.nodes: Expected `object`, got `int`"),
        (document(nodes={"costs": [[1]]}), "problem.nodes: Object missing required field `intervals`"),
        (document(nodes_costs=3), "problem.nodes.costs: Expected `array`, got `int`"),
        (document(nodes_costs=[[1]]), "1 nodes have costs, 2 intervals"),
        (document(nodes_costs=[[1], []]), "node 1 has no strategy"),
        (document(nodes_costs=[[1], 7]), "the costs of node 1 are not a flat list of whole numbers: .* got `int`"),
        (document(nodes_costs=[[1], [1, 1.5]]), "costs of node 1 are not .* whole numbers: .*`float` at position 1"),
        (document(nodes_costs=[[1], [True, 2]]), "costs of node 1 are not .* whole numbers: .*`bool` at position 0"),
        (document(nodes_costs=[[10**19], [1, 2]]), "the costs of node 0 have a number of more than 64 bits"),
        (document(nodes_usages=[[1], [1]]), "node 1 has 2 costs and 1 usages"),
        (document(nodes_usages=[[1], [0, -5]]), "strategy 1 of node 1 has a usage of -5"),
        (document(nodes_usages=[[1], ["a", 1]]), "the usages of node 1 are not .*`str` at position 0"),
        (document(nodes_intervals=[[0, 1], [0]]), "the interval of node 1: Expected `array` of length 2"),
        (document(nodes_intervals=[[0, 1], [0, 1.5]]), "the interval of node 1: Expected `int`, got `float`"),
        (document(nodes_intervals=[[0, 1], None]), "the interval of node 1: Expected `array`, got `null`"),
        (document(nodes_intervals=[[0, 1], [0, 2**70]]), "the interval of node 1 ends at 1180591620717411303424"),
        (document(edges={"nodes": []}), "problem.edges: Object missing required field `costs`"),
        (document(edges_nodes=[[0, 1], [1, 0]]), "2 edges have nodes, 1 have costs"),
        (document(edges_nodes=[[0, 7]]), r"edge 0 joins nodes \[0, 7\], not two of the 2 there are"),
        (document(edges_nodes=[[-1, 0]]), r"edge 0 joins nodes \[-1, 0\], not two of the 2"),
        (document(edges_nodes=[[0, 1, 1]]), r"edge 0 joins nodes \[0, 1, 1\], not two of the 2"),
        (document(edges_nodes=[[1, 1]]), "edge 0 joins node 1 with itself"),
        (document(edges_nodes=[["a", 1]]), "the nodes of edge 0: Expected `int`, got `str`"),
        (document(edges_costs=[[5]]), "edge 0 has 1 costs for 1 x 2 pairs of strategies of nodes 0 and 1"),
        (document(edges_costs=[[5, [6]]]), "the costs of edge 0 are not a flat list .*`array` at position 1"),
        (document(usage_limit="9"), "problem.usage_limit: Expected `int . null`, got `str`"),
        (document(usage_limit=9.5), "problem.usage_limit: Expected `int . null`, got `float`"),
    ],
)
def test_a_malformed_file_gets_one_clear_error(data: bytes, message: str, tmp_path: Path) -> None:
    """It says what is wrong, where, and what to do."""
    path = tmp_path / "bad.json"
    path.write_bytes(data)

    with pytest.raises(ProblemError, match=message) as caught:
        iopddl.load(path)

    assert str(path) in str(caught.value)
    assert caught.value.hint


@given(
    where=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    junk=st.sampled_from([None, True, "x", -1, 1.5, [], {}, [[]], [1, 2, 3], 2**70, {"nodes": []}]),
)
def test_a_file_with_anything_replaced_loads_or_is_refused(where: list[int], junk: Any) -> None:
    """One member of the file, at any depth, becomes something else; nothing but a `ProblemError` may come of it."""
    body = json.loads(document())
    holder: Any = None
    value: Any = body
    for step in where:
        if not isinstance(value, dict | list) or not value:
            break
        holder, key = value, list(value)[step % len(value)] if isinstance(value, dict) else step % len(value)
        value = holder[key]
    holder[key] = junk
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        Path(file.name).write_text(json.dumps(body))

        try:
            num_nodes, refusal = iopddl.load(file.name).num_nodes, None
        except ProblemError as error:
            num_nodes, refusal = None, str(error)

        assert num_nodes == 2 if refusal is None else file.name in refusal


def test_parallel_edges_empty_intervals_and_a_missing_limit_are_fine(tmp_path: Path) -> None:
    """Both edges of the pair count, one given from either end; node 1 uses nothing at any time."""
    edges = {"nodes": [[0, 1], [1, 0]], "costs": [[5, 6], [70, 80]]}
    path = tmp_path / "p.json"
    path.write_bytes(document(edges=edges, nodes_intervals=[[0, 2], [3, 3]], usage_limit=None))

    problem = iopddl.load(path)

    assert problem.num_edges == 2
    assert problem.cost((0, 1)) == 1 + 2 + 6 + 80
    assert problem.usage((0, 1)) == ((0, 1), (2, 0))
    assert problem.limits == ()


def test_equal_lists_of_a_file_share_one_array(tmp_path: Path) -> None:
    """Files of contest size are mostly repetition."""
    body = {
        "nodes": {"intervals": [[0, 1]] * 3, "costs": [[1, 2]] * 3, "usages": [[1, 2]] * 3},
        "edges": {"nodes": [[0, 1], [1, 2]], "costs": [[1, 2, 3, 4]] * 2},
    }
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"problem": body}))

    problem = iopddl.load(path)

    assert len({id(costs) for costs in problem.node_costs}) == 1
    assert len({id(usage.amounts) for usage in problem.usages}) == 1
    assert len(problem.edge_tables) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"cannot read .*none\.json: No such file"):
        iopddl.load(tmp_path / "none.json")
