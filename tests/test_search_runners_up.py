"""The plans besides the best one, held against enumeration and against random plans."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice, product

import numpy as np
import pytest

from autopar.configuration import Family, families
from autopar.describe.axis_roles import roles_of_axes
from autopar.describe.block_decisions import assemble_blocks
from autopar.describe.signature import Signature, distinct, signature
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.restrict import narrow
from autopar.formulate.step_time import Split, step_time
from autopar.pipeline_partition.p2p import hop_seconds
from autopar.plan import StagePlan
from autopar.problem import Choice, Problem
from autopar.recompute import Recompute
from autopar.request import JobRequest
from autopar.search.branch_and_bound import search as run_search
from autopar.search.branching import Branch, MoreRecompute, WithoutRole, WithRole, ZeroLevels, apply, branches_of
from autopar.search.candidate import Candidate
from autopar.search.context import SearchContext
from autopar.search.node_solver import NodeSolver, open_node
from autopar.search.outcome import Outcome
from autopar.task import Effort, Task, prepare
from tests.formulations import DIMS, lowered_bytes, optimum, splits, stage_peak, tables

Ranges = tuple[tuple[int, int], ...]

CLOSE = 3e-6
"""Relative: placement problems are proven optimal to 1e-6 each, and a plan is compared with another one."""

BASE = Signature((("dp", 1, 8), ("tp", 0, 4)), 2, "1f1b", 8, "selective")


@cache
def _task(mode: str = "train", memory: float | None = None, gpus: int = 2, batch: int = 4) -> Task:
    dims = DIMS["mlp-xs"] | {"num_layers": 2}
    return prepare(JobRequest("zoo:mlp-xs", gpus=gpus, global_batch=batch, mode=mode, dims=dims, memory_limit=memory))


def _run(task: Task, keep: int = 3) -> Outcome:
    return run_search(task.space, task.context(Effort(top_k=keep)))


def test_recomputing_more_is_another_plan_and_recomputing_less_is_not() -> None:
    """A slower plan that keeps less takes less memory; one that keeps more is of no use."""
    more, less = replace(BASE, recompute="full"), replace(BASE, recompute="none")

    assert not more.is_akin_to(BASE)
    assert less.is_akin_to(BASE)
    assert BASE.is_akin_to(BASE)
    assert not replace(less, num_microbatches=4).is_akin_to(BASE)
    assert distinct([BASE, less, more, BASE, replace(more, schedule="gpipe")], lambda own: own) == [
        BASE,
        more,
        replace(more, schedule="gpipe"),
    ]


@pytest.mark.parametrize(("memory", "keep", "proven"), [(None, 4, False), (None, 3, True), (1400.0, 3, True)])
def test_the_best_plans_by_enumeration(memory: float | None, keep: int, proven: bool) -> None:
    """On two devices every choice of every configuration under every split, without those akin to better ones.

    Inference of two layers, where the roles of axes are never half and half in what is best. The fourth plan is a
    pipeline, whose bound does not see the time of its hops.
    """
    task = _task("infer", memory)
    nodes = [open_node(task.context(Effort()), (configuration,), np.inf) for configuration in task.space]
    found = sorted(
        (seconds, number, choice, split)
        for number, own in enumerate(nodes)
        if own is not None
        for seconds, choice, split in _everything(own)
    )
    expected: list[tuple[float, Signature]] = []
    for seconds, number, choice, ranges in found:
        own = nodes[number]
        assert own is not None
        item = seconds, _signature(own, choice, ranges)
        if any(item[1].is_akin_to(faster) for _, faster in expected):
            continue
        split = Split.uniform(ranges, (Recompute.NONE,) * len(ranges))
        bytes_of = lowered_bytes(own.tables, choice)
        peaks = [stage_peak(bytes_of, own.pipeline, split, stage) for stage in range(len(ranges))]
        if max(peaks) <= task.job.memory_limit:
            expected.append(item)
        if len(expected) > keep:
            break

    outcome = _run(task, keep)

    plans = outcome.distinct()[:keep]
    assert [plan.objective for plan in plans] == pytest.approx([seconds for seconds, _ in expected[:keep]], rel=CLOSE)
    assert outcome.complete <= expected[keep][0] * (1 + CLOSE)
    assert (outcome.complete >= plans[-1].objective * (1 - CLOSE)) is proven


def _everything(own: NodeSolver) -> Iterator[tuple[float, Choice, Ranges]]:
    """Yield step time, choice and cut of every plan of inference, whatever memory it takes.

    On one device all choices are alike: one in a hundred will do.
    """
    made, pipeline = own.tables, own.pipeline
    every = product(*(range(node.count) for node in made.nodes))
    for choice in every if made.mesh.size > 1 else islice(every, 0, None, 100):
        totals = made.block_seconds(choice)
        if np.isfinite(totals).all():
            hop = own.finder.costs.hops(choice, pipeline)
            for ranges in splits(made.folded.num_blocks, pipeline.num_stages):
                split = Split.uniform(ranges, (Recompute.NONE,) * len(ranges))
                seconds = step_time(totals, made.folded.chain, pipeline, split, hop_seconds(split, hop)).seconds
                yield seconds, choice, ranges


def _signature(own: NodeSolver, choice: Choice, ranges: Ranges) -> Signature:
    blocks = assemble_blocks(own.tables, choice)
    stages = tuple(StagePlan(part, (0, 1), "none") for part in ranges)
    roles = roles_of_axes(own.state.configuration.mesh.axes, blocks, own.tables.folded)
    return signature(own.state.configuration, stages, blocks, roles)


def test_narrowed_tables_price_the_choices_that_are_left_alike() -> None:
    """Random strategies are left out, then random choices of what is left are priced by both; meshes of two axes."""
    whole, rng = tables("gpt2"), np.random.default_rng(0)
    masks = {index: rng.random(node.count) < 0.5 for index, node in enumerate(whole.nodes)}
    for index, node in enumerate(whole.nodes):
        masks[index][rng.integers(node.count)] = True
    kept = [np.flatnonzero(masks[index]) for index in range(len(whole.nodes))]

    left = narrow(whole, masks)

    assert left is not None
    for _ in range(5):
        choice = tuple(int(rng.integers(node.count)) for node in left.nodes)
        before = tuple(int(own[strategy]) for own, strategy in zip(kept, choice, strict=True))
        np.testing.assert_array_equal(left.kind_totals(choice), whole.kind_totals(before))
        assert [b.amounts[choice[b.node]] for b in left.bytes] == [b.amounts[before[b.node]] for b in whole.bytes]
        assert [e.outside and e.outside.at(choice[e.first], choice[e.second]) for e in left.edges] == [
            e.outside and e.outside.at(before[e.first], before[e.second]) for e in whole.edges
        ]
    assert narrow(whole, {0: np.zeros(whole.nodes[0].count, dtype=bool)}) is None


@pytest.mark.parametrize("memory", [None, 7.0e3])
def test_no_other_plan_is_faster_than_what_is_proven(memory: float | None) -> None:
    """Random plans of every configuration that are akin to none of those returned, on every branch of those."""
    task = _task(memory=memory)
    outcome = _run(task)
    plans = outcome.distinct()[:3]
    rng = np.random.default_rng(0)

    tried = 0
    for family in families(task.space):
        search = task.context(Effort())
        own = open_node(search, family, np.inf)
        assert own is not None
        cells: list[tuple[Branch, ...]] = [()]
        folded = own.tables.folded
        cells += [(each,) for plan in plans for each in branches_of(plan, family, folded).branches if _fits(each, own)]
        for cell in cells:
            left = apply(cell, own.tables, search.constraints)
            if left is None:
                continue
            node = NodeSolver(replace(search, constraints=left[1]), family, left[0], np.inf)
            for price in rng.random((2, 2)):
                weighting = weights(
                    node.tables, node.pipeline, recompute=Recompute.NONE, hidden=price[0], bounding=False
                )
                noisy = _noisy(problem(node.tables, weighting), price[1], rng)
                choice = optimum(noisy)[1]
                node.finder.consider(choice)
            if node.best is None or any(node.best.signature.is_akin_to(plan.signature) for plan in plans):
                continue
            tried += 1
            assert node.best.objective >= outcome.complete * (1 - CLOSE)

    assert tried >= 5


def test_plans_that_deal_out_experts_otherwise_are_on_branches() -> None:
    """From a data parallel plan with one matrix for all there is one that deals out experts, and the way back."""
    task = prepare(JobRequest("zoo:mixtral-8x7b", gpus=2, global_batch=8, mode="infer", dims=DIMS["mixtral-8x7b"]))
    search = task.context(Effort())
    family = next(own for own in families(task.space) if own[0].mesh.size == 2 and own[0].num_microbatches == 1)

    copied = _best(search, family, (WithoutRole(0, "ep"), WithRole(0, "dp")))
    (dealing,) = _of_experts(copied, family, task)
    dealt = _best(search, family, (dealing, WithRole(0, "dp")))
    (copying,) = _of_experts(dealt, family, task)

    assert (copied.signature.experts, dealt.signature.experts) == (1, 2)
    assert copied.signature.degrees == dealt.signature.degrees == (("dp", 0, 2),)
    assert (dealing, copying) == (WithRole(0, "ep"), WithoutRole(0, "ep"))


def _best(search: SearchContext, family: Family, branches: tuple[Branch, ...]) -> Candidate:
    """Return the plan on some branches that takes least time by the placement problem."""
    own = open_node(search, family, np.inf)
    assert own is not None
    left = apply(branches, own.tables, search.constraints)
    assert left is not None
    node = NodeSolver(replace(search, constraints=left[1]), family, left[0], np.inf)
    weighting = weights(node.tables, node.pipeline, recompute=Recompute.NONE, hidden=0.0, bounding=False)
    node.finder.consider(optimum(problem(node.tables, weighting))[1])
    assert node.best is not None
    return node.best


def _of_experts(candidate: Candidate, family: Family, task: Task) -> list[Branch]:
    found = branches_of(candidate, family, task.workload.folded(task.job.global_batch)).branches
    return [branch for branch in found if isinstance(branch, WithRole | WithoutRole) and branch.role == "ep"]


def _fits(branch: Branch, own: NodeSolver) -> bool:
    """Whether the mesh has the axes that a branch speaks of."""
    match branch:
        case MoreRecompute():
            return True
        case ZeroLevels():
            return max(branch.axes) < len(own.tables.mesh.axes)
        case _:
            return branch.axis < len(own.tables.mesh.axes)


def _noisy(instance: Problem, share: float, rng: np.random.Generator) -> Problem:
    """Return the problem with costs of nodes changed at random, so that its optimum is another choice."""
    costs = tuple(cost * (1 + share * rng.random(len(cost))) for cost in instance.node_costs)
    return replace(instance, node_costs=costs)
