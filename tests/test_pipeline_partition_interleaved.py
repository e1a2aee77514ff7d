"""Schedules without a closed form: objective and memory agree with the simulator, and bounds are below."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.configuration import Configuration, configurations, describe, families, virtual_stages
from autopar.pipeline_partition.interleaved import _fastest_mixtures, _Stage
from autopar.program.lower import lower
from autopar.program.verify import verify_program
from autopar.schedule import SCHEDULES
from autopar.schedule.holding import moments
from autopar.sharding import Mesh
from autopar.simulate import simulate
from tests.executions import COSTS, Execution, model_rules, solved_candidate, written
from tests.shares import one_in

CASES = [("gpipe", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("interleaved", 2), ("1f1b-a2a", 2), ("dualpipe-v", 2)]
COUNT = 4


def _best_cut(name: str, chunks: int, cache_dir: Path, limit: float = 1e12) -> tuple[float, float, float]:
    """Return objective, simulated seconds, and bytes on the fullest device of the best plan on 2 x 4 devices."""
    execution, rules = Execution.of("gpt2", 4, COUNT), model_rules("gpt2", cache_dir)
    configuration = Configuration(2, Mesh.of(outer=2, inner=2), COUNT, name, chunks)
    candidate = solved_candidate(execution.folded, rules, configuration, 4, limit)
    plan = written(candidate, 4 * COUNT, True)
    program = lower(plan, execution.folded, COSTS)
    verify_program(program, execution.folded, rules)
    timeline = simulate(program, COSTS)
    assert len({stage.devices for stage in plan.stages}) == 2
    assert len(plan.stages) == 2 * chunks
    return candidate.objective, timeline.step_seconds, timeline.peak_bytes


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_the_objective_equals_the_simulated_step(name: str, chunks: int, cache_dir: Path) -> None:
    """For a plan on 2 x 4 devices, up to reductions that wait for other traffic on their link."""
    objective, simulated, _ = _best_cut(name, chunks, cache_dir)

    assert objective == pytest.approx(simulated, rel=1e-3 if SCHEDULES[name].splits or chunks > 1 else 1e-2)


@pytest.mark.parametrize(("name", "chunks"), one_in(2, CASES, unpacked=True))
def test_plans_of_any_schedule_fit(name: str, chunks: int, cache_dir: Path) -> None:
    """With as much memory as the best plan holds one as good is found; with less one that fits, and takes no less time.

    The V has the embeddings and the head on one device, which leaves nothing to recompute here.
    """
    objective, _, most = _best_cut(name, chunks, cache_dir)

    again, _, peak = _best_cut(name, chunks, cache_dir, most)
    assert again == pytest.approx(objective, rel=1e-4)
    assert peak <= most
    if name != "zb-v":
        tight, _, peak = _best_cut(name, chunks, cache_dir, 0.98 * most)
        assert peak <= 0.98 * most
        assert tight >= objective * (1 - 1e-4)


def test_the_space_lists_schedules_where_they_make_a_difference() -> None:
    """Stages need blocks, interleaved ones whole rounds; one stage needs no order, one microbatch a split backward."""
    space = configurations(gpus=4, devices_per_node=8, num_blocks=9, global_batch=8, batch_of_model=None, mode="train")

    found: dict[tuple[int, int], set[tuple[str, int]]] = {}
    for c in space:
        found.setdefault((c.num_stages, c.num_microbatches), set()).add((c.schedule, c.num_chunks))
    usual = {("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)}
    assert found[1, 8] == {("1f1b", 1)}
    assert found[2, 1] == {("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)}
    assert found[4, 2] == usual
    assert found[2, 4] == usual | {("interleaved", 2), ("interleaved", 4)}
    assert found[4, 4] == usual | {("interleaved", 2)}
    assert "interleaved (v = 2, 4)" in describe(space)[0]


def test_schedules_that_hide_the_dispatch_are_listed_for_models_that_route_tokens() -> None:
    """1F1B with virtual stages in a pipeline, DualPipeV with two microbatches per stage of a group."""
    size: dict[str, Any] = {"gpus": 4, "devices_per_node": 8, "num_blocks": 9, "global_batch": 8}
    space = configurations(**size, batch_of_model=None, mode="train", routes=True)

    found = {(c.num_stages, c.num_microbatches, c.schedule, c.num_chunks) for c in space if c.hides_dispatch}
    turns = {(2, m, v) for m in (2, 4, 8) for v in (2, 4)} | {(4, m, 2) for m in (4, 8)}
    assert found == {
        *((1, m, "1f1b-a2a", 1) for m in (2, 4, 8)),
        *((p, m, "1f1b-a2a", v) for p, m, v in turns),
        *((p, m, "dualpipe-v", 2) for p, m in ((2, 4), (2, 8), (4, 8))),
    }
    assert all(len({c.hides_dispatch for c in family}) == 1 for family in families(space))
    assert "1f1b-a2a (v = 1, 2, 4)" in describe(space)[0]


@pytest.mark.parametrize(("num_groups", "num_blocks"), [(2, 34), (4, 82), (8, 128), (3, 7), (4, 7)])
def test_virtual_stages_are_the_most_of_their_least_blocks(num_groups: int, num_blocks: int) -> None:
    """Of stages with at least one block, two, four, ..."""
    fits = {
        least: [chunks for chunks in range(2, num_blocks + 1) if chunks * num_groups * least <= num_blocks]
        for least in (1, 2, 4, 8, 16, 32, 64, 128)
    }

    assert virtual_stages(num_groups, num_blocks) == sorted({max(most) for most in fits.values() if most})


def _single(kept: tuple[float, ...], again: tuple[float, ...]) -> _Stage:
    """Return a stage of one block with given kept bytes and recompute seconds per mixture."""
    count = len(kept)
    sizes = np.zeros((count, 5))
    sizes[:, 0] = sizes[:, 2] = sizes[:, 3] = kept
    nothing = np.zeros(count)
    numbers = np.arange(count)
    return _Stage(
        0, 0, numbers, sizes, np.array(again), nothing, nothing, 0.0, 0.0, 0.0, 0.0, 0.0, np.zeros(2), np.zeros(2)
    )


@pytest.mark.parametrize("seed", range(20))
def test_recompute_is_reduced_where_it_saves_most(seed: int) -> None:
    """At one price all early stages recompute whole blocks; then all but the first of equal ones need not."""
    rng = np.random.default_rng(seed)
    kept, again = (5.0, 3.0, 0.5), (0.0, 0.1, 3.0)
    stages = [_single(kept, again) for _ in range(4)]
    rows = moments(SCHEDULES["interleaved"], group=0, num_groups=4, num_microbatches=8, num_chunks=4)
    counts = rows.reshape(len(rows), 4, 5)

    def bytes_of(taken: tuple[int, ...]) -> float:
        return float((rows @ np.concatenate([stages[0].sizes[own] for own in taken])).max())

    all_selective = bytes_of((1, 1, 1, 1))
    limit = all_selective - float(rng.uniform(0.01, 0.9)) * float(counts[..., 0].max())
    ways = _fastest_mixtures(stages, rows, limit, 0.0, (0,) * 4)

    best = min(sum(again[own] for own in every) for every in product(range(3), repeat=4) if bytes_of(every) <= limit)
    assert len(ways) == 2
    for taken in ways:
        assert bytes_of(tuple(taken)) <= limit
        assert sum(again[own] for own in taken) <= best + 0.1 * 4
        assert taken.count(2) == 1 == taken.index(2) + 1


@pytest.mark.parametrize("seed", range(20))
def test_one_of_two_ways_has_the_least_recompute(seed: int) -> None:
    """The largest saving may take the room of two others nearly as large: the second way finds those."""
    rng = np.random.default_rng(seed)
    kept, again = (5.6, 3.1, 0.4), (0.0, 0.02, 1.0)
    stages = [_single(kept, again) for _ in range(6)]
    rows = moments(SCHEDULES["interleaved"], group=1, num_groups=4, num_microbatches=8, num_chunks=6)

    def bytes_of(taken: tuple[int, ...]) -> float:
        return float((rows @ np.concatenate([stages[0].sizes[own] for own in taken])).max())

    every = list(product(range(3), repeat=6))
    limit = float(rng.uniform(bytes_of((2,) * 6), bytes_of((1,) * 6)))
    ways = _fastest_mixtures(stages, rows, limit, 0.0, (0,) * 6)

    best = min(sum(again[own] for own in taken) for taken in every if bytes_of(taken) <= limit)
    assert all(bytes_of(tuple(taken)) <= limit for taken in ways)
    assert min(sum(again[own] for own in taken) for taken in ways) <= best + 0.02 * 6


def test_adding_recompute_terminates_if_mixtures_alternate() -> None:
    """Two mixtures of equal seconds are each too large at another moment; a third one fits."""
    sizes = np.array([[5.0, 0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 5.0, 5.0, 0.0], [1.0, 0.0, 1.0, 1.0, 0.0]])
    stage = replace(_single((1.0,) * 3, (0.0, 0.0, 1.0)), sizes=sizes)
    rows = np.array([[2.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0, 0.0]])

    assert _fastest_mixtures([stage], rows, 4.0, 0.0, (0,)) == ([2], [2])


def test_data_parallelism_around_pipelines_is_listed_where_stages_get_other_devices() -> None:
    """With the minor axis of two in a node, and not where that fills one; under the schedules of Megatron-LM."""
    size: dict[str, Any] = {"gpus": 32, "devices_per_node": 8, "num_blocks": 9, "global_batch": 8}
    space = configurations(**size, batch_of_model=None, mode="train", orders=True)

    inside = {(c.num_stages, str(c.mesh), c.block) for c in space if c.block}
    assert inside == {
        *((2, mesh, block) for mesh, block in (("inner=16", 1), ("outer=8×inner=2", 2), ("outer=4×inner=4", 4))),
        *((4, mesh, block) for mesh, block in (("inner=8", 1), ("outer=4×inner=2", 2), ("outer=2×inner=4", 4))),
        *((8, mesh, block) for mesh, block in (("inner=4", 1), ("outer=2×inner=2", 2))),
    }
    assert {c.schedule for c in space if c.block} == {"1f1b", "interleaved"}
    assert all(len({c.block for c in family}) == 1 for family in families(space))
