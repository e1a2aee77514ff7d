"""Hop seconds by where a chain of blocks is cut, against the simulator."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.configuration import Configuration
from autopar.cost import CostModel
from autopar.formulate.block_memory import ChainBytes
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.step_time import Pipeline, Split, StepTime
from autopar.formulate.tables import Slot
from autopar.pipeline_partition.p2p import StageTransfers
from autopar.pipeline_partition.stage_cuts import best_split
from autopar.program.lower import lower
from autopar.recompute import Recompute
from autopar.search.candidate import Candidate
from autopar.search.lowered_memory import ChoiceCosts
from autopar.sharding import Mesh
from autopar.simulate import simulate
from autopar.simulate.hops import hops
from tests.executions import COSTS, Execution, model_rules, solved_candidate, written
from tests.formulations import optimum, random_choice

SAMPLES, COUNT = 4, 24
FAR = replace(COSTS.cluster.inter, bandwidth=COSTS.cluster.inter.bandwidth / 500)
NODES = CostModel(replace(COSTS.cluster, devices_per_node=4, inter=FAR))
"""Nodes of two groups of two devices, with slow links between them."""


@pytest.mark.parametrize(
    ("schedule", "of_stage"),
    [("1f1b", (0, 1, 2, 3)), ("interleaved", (0, 1, 0, 1)), ("zb-v", (0, 1, 1, 0))],
)
def test_hops_are_those_of_the_simulator(schedule: str, of_stage: tuple[int, ...], cache_dir: Path) -> None:
    """For a net whose blocks hand over ever less, cut at random, within nodes and between them."""
    folded, rules = Execution.of("resnet50", SAMPLES, 2).folded, model_rules("resnet50", cache_dir)
    groups = len(set(of_stage))
    mesh, chunks, rng = Mesh.of(inner=2), len(of_stage) // groups, np.random.default_rng(0)
    tables = build_tables(folded, rules, mesh, NODES)
    pipeline = Pipeline(len(of_stage), COUNT, schedule, num_chunks=chunks)
    weighting = weights(tables, pipeline, recompute=Recompute.NONE, hidden=1.0, bounding=False)
    instance, several = problem(tables, weighting), set()
    _, choice = optimum(instance)
    for _ in range(5):
        choice = random_choice(instance, rng, near=choice)
        stops = sorted(rng.choice(np.arange(1, folded.num_blocks), len(of_stage) - 1, replace=False).tolist())
        ranges = tuple(zip([0, *stops], [*stops, folded.num_blocks], strict=True))
        split = Split.uniform(ranges, (Recompute.NONE,) * len(ranges))
        configuration = Configuration(groups, mesh, COUNT, schedule, chunks)
        candidate = Candidate(configuration, tables, choice, split, StepTime(0.0, 0.0, 0.0, np.zeros(len(ranges))))
        program = lower(written(candidate, SAMPLES * COUNT, True), folded, NODES)

        found = ChoiceCosts(tables, pipeline, mesh.size).hops(choice, pipeline)

        assert isinstance(found, StageTransfers)
        for stage, (own, hop) in enumerate(zip(found.between_stages(ranges), hops(program, NODES), strict=True)):
            sent = of_stage[stage] != of_stage[stage + 1]
            assert own == pytest.approx([hop.forward.seconds, hop.backward.seconds] if sent else [0.0, 0.0])
            several.add(round(float(own[0]), 9))
        assert (found.least <= found.between_stages(ranges)).all()
    assert len(several) >= 3


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_the_objective_depends_on_the_size_of_messages(schedule: str, cache_dir: Path) -> None:
    """The objective equals the simulated step for a net whose first blocks hand over many times more."""
    folded, rules = Execution.of("resnet50", SAMPLES, 2).folded, model_rules("resnet50", cache_dir)

    found = solved_candidate(folded, rules, Configuration(4, Mesh.of(inner=2), COUNT, schedule), SAMPLES, costs=NODES)

    program = lower(written(found, SAMPLES * COUNT, True), folded, NODES)
    ways = [hop.forward.seconds for hop in hops(program, NODES)]
    assert max(ways) > 1.5 * min(ways)
    assert found.objective == pytest.approx(simulate(program, NODES).step_seconds, rel=0.02)


def test_a_chain_is_cut_where_little_is_handed_over() -> None:
    """Two stages of four equal blocks are cut after the third, as its input takes as long as all else."""
    chain, seconds = (0, 0, 1, 2), 1.0
    totals = np.zeros((3, len(Slot)))
    totals[:, [Slot.FORWARD, Slot.BACKWARD]] = seconds / 2
    table = np.array([[0.0, 9.0, 0.0]])
    hop = StageTransfers(np.array(chain), np.zeros(1, dtype=np.int64), table, np.zeros((1, 3)))
    nothing = ChainBytes.nothing(chain, (Recompute.NONE,))

    even, uneven = (best_split(totals, nothing, Pipeline(2, 4, "1f1b"), np.inf, own) for own in (0.0, hop))

    assert even is not None
    assert even[0].ranges == ((0, 2), (2, 4))
    assert uneven is not None
    assert uneven[0].ranges in (((0, 1), (1, 4)), ((0, 3), (3, 4)))
    assert uneven[1].seconds == pytest.approx(4 + 3 * 3)  # one microbatch, and three that follow
