"""Plans that are the best ones with some values placed by hand."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from autopar import solvers
from autopar.configuration import Configuration
from autopar.discover import Rules
from autopar.folding.fold import Folded
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.step_time import Pipeline, Split, StepTime
from autopar.formulate.tables import Node, Tables
from autopar.ir.graph import Graph, Role
from autopar.plan import Job, ModelInfo, OpPlacement, Plan
from autopar.problem import Problem
from autopar.recompute import Recompute
from autopar.search.candidate import Candidate
from autopar.search.candidate_plan import assemble
from autopar.sharding import format_placements
from tests.executions import COSTS, Execution, random_feeds


def best_candidate(tables: Tables, configuration: Configuration, limit: Callable[[Problem], Problem]) -> Candidate:
    """Return the best choice on one stage in a problem with fewer strategies."""
    pipeline = Pipeline(1, configuration.num_microbatches, configuration.schedule)
    weighting = weights(tables, pipeline, recompute=Recompute.NONE, hidden=0.0, bounding=False, early=True)
    choice = solvers.load("auto").solve(limit(problem(tables, weighting)), time_limit=10.0).choice
    assert choice is not None, "no plan is allowed"
    whole = Split.uniform(((0, tables.folded.num_blocks),), (Recompute.NONE,))
    return Candidate(configuration, tables, choice, whole, StepTime(1.0, 1.0, 0.0, np.ones(1)))


def pinned_candidate(folded: Folded, rules: Rules, configuration: Configuration, pins: Mapping[str, str]) -> Candidate:
    """Return the best choice on one stage in which the values in `pins` lie as it says wherever they are used."""
    tables = build_tables(folded, rules, configuration.mesh, COSTS)
    return best_candidate(tables, configuration, lambda instance: pinned(instance, tables, pins))


def plan_of(candidate: Candidate, samples: int) -> Plan:
    """Return a candidate as its file gives it back."""
    configuration = candidate.configuration
    mode = "infer" if configuration.schedule == "forward-only" else "train"
    batch = samples * configuration.num_microbatches
    job = Job(mode, configuration.mesh.size, batch, 1e12, COSTS.cluster.to_dict())
    return Plan.from_json(assemble(candidate, ModelInfo("tiny", "zoo:tiny", "00", 0), job).to_json())


def pinned_plan(
    folded: Folded, rules: Rules, configuration: Configuration, samples: int, pins: Mapping[str, str]
) -> Plan:
    """Return the plan of `pinned_candidate`."""
    return plan_of(pinned_candidate(folded, rules, configuration, pins), samples)


def pinned(instance: Problem, tables: Tables, pins: Mapping[str, str]) -> Problem:
    """Return the problem in which all strategies are forbidden that place a value otherwise."""
    costs = []
    for node, cost in zip(tables.nodes, instance.node_costs, strict=True):
        allowed = np.ones(node.count, dtype=bool)
        for name, texts in _placed(tables, node):
            if name in pins:
                allowed &= np.array([text == pins[name] for text in texts])
        costs.append(np.where(allowed, cost, np.inf))
    return replace(instance, node_costs=tuple(costs))


def _placed(tables: Tables, node: Node) -> list[tuple[str, list[str]]]:
    """Return what a node places, with the placement of each strategy as text."""
    if node.options is None:
        assert node.value is not None
        names, arrays = [node.value.name], [node.placements]
    else:
        op = tables.folded.kinds[node.kind].ops[node.position]
        names, arrays = [*op.inputs, *op.outputs], [*node.options.inputs, *node.options.outputs]
    return [
        (name, [format_placements(tables.meaning.placements(name, int(number), tables.mesh)) for number in numbers])
        for name, numbers in zip(names, arrays, strict=True)
        if numbers is not None
    ]


def op_placements(plan: Plan) -> dict[str, OpPlacement]:
    """Return how each op runs."""
    return {op.op: op for block in plan.blocks for op in block.ops}


def execution(graph: Graph, count: int = 2) -> Execution:
    """Return a graph on `count` random microbatches, with parameters so small that no softmax saturates.

    Where gradients vanish Adam would make large numbers of rounding errors.
    """
    rng = np.random.default_rng(3)
    names = [state.input for state in graph.states if state.role is Role.PARAMETER]
    return Execution.of_graph(
        graph, *random_feeds(graph, count, {name: rng.normal(0, 0.3, graph.values[name].shape) for name in names})
    )
