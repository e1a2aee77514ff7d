"""Chains of many blocks: frontiers of windows against their definition, and cuts that skip infeasible lengths."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.formulate.block_memory import ChainBytes
from autopar.formulate.constraints import FREE
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Slot
from autopar.pipeline_partition.block_ranges import windows
from autopar.pipeline_partition.partition_kernel import (
    AGAIN,
    COLUMNS,
    FORTH,
    GATHERS,
    HOSTED,
    KEPT,
    LATE,
    RUNNING,
    TRANSIT,
    frontiers,
)
from autopar.pipeline_partition.stage_cuts import UNLIMITED, _best_cut, best_split, fitting_stages, symbols_for
from tests.formulations import good_choice, lowered_bytes, tables

MOST = 512
"""More mixtures than any window here has, so that no frontier is thinned."""


def _case(rng: np.random.Generator, num_windows: int, flavours: int, states: int) -> dict[str, Any]:
    """Return windows with blocks of few distinct sizes, so that many mixtures are equal."""
    steps = 3
    step = rng.integers(0, steps, num_windows)
    few = rng.integers(1, 4, (steps, flavours)).astype(float)
    kept = rng.integers(0, 4, (steps, states, flavours)).astype(float)
    covers = (rng.random((steps, states, states)) < 0.5) | np.eye(states, dtype=bool)
    return {
        "parent": np.array([rng.integers(-1, window) if window else -1 for window in range(num_windows)]),
        "spent": rng.random(num_windows),
        "due": rng.random(num_windows) * 3,
        "again": few[step] * rng.choice([0.1, 1.0]),
        "gathers": few[step],
        "step": step,
        "kept": kept,
        "running": kept + rng.integers(0, 3, kept.shape),
        "closed": np.where(rng.random((num_windows, flavours)) < 0.05, np.inf, 0.0),
        "late": rng.integers(0, 2, steps).astype(float),
        "after": rng.integers(0, states, kept.shape),
        "covers": covers.astype(np.int64),
        "forth": few[step] * rng.choice([0.0, 0.1]),
        "transit": rng.integers(0, 2, (num_windows, flavours)).astype(float),
        "hosted": rng.integers(0, 2, (num_windows, flavours)).astype(float),
        "room": rng.uniform(8, 40, num_windows),
        "host_room": float(rng.choice([np.inf, 6.0])),
        "waiting": int(rng.integers(0, 3)),
        "most": MOST,
    }


Mixture = tuple[list[float], int, int, int]
"""Its columns, its state, the mixture of the parent it comes from, and the flavour of its last block."""


def _defined(case: dict[str, Any], window: int, olds: Sequence[Mixture]) -> list[Mixture]:
    """Return the frontier of a window by its definition, comparing all pairs of mixtures."""
    row, new = case["step"][window], list[Mixture]()
    for number, (old, state, *_) in enumerate(olds):
        for own in range(case["again"].shape[1]):
            columns = list(old)
            fullest = old[KEPT] + case["running"][row, state, own] + case["closed"][window, own]
            columns[RUNNING] = max(old[RUNNING] + case["late"][row], fullest)
            columns[KEPT] += case["kept"][row, state, own]
            columns[LATE] = max(old[LATE], case["due"][window] - (case["spent"][window] + old[AGAIN] - old[FORTH]))
            for column, name in ((AGAIN, "again"), (GATHERS, "gathers"), (FORTH, "forth"), (HOSTED, "hosted")):
                columns[column] += case[name][window, own]
            columns[TRANSIT] = max(old[TRANSIT], case["transit"][window, own])
            on_device = case["waiting"] * columns[KEPT] + columns[RUNNING] + columns[TRANSIT]
            if on_device <= case["room"][window] and (case["waiting"] + 1) * columns[HOSTED] <= case["host_room"]:
                new.append((columns, int(case["after"][row, state, own]), number, own))
    watched = [KEPT, RUNNING, FORTH, TRANSIT, *([HOSTED] if np.isfinite(case["host_room"]) else [])]
    left: list[Mixture] = []
    for mixture in sorted(new, key=lambda each: each[0][AGAIN]):
        beaten = any(
            case["covers"][row, other[1], mixture[1]]
            and all(other[0][column] <= mixture[0][column] * (1 + 1e-9) for column in watched)
            for other in left
        )
        if not beaten:
            left.append(mixture)
    return left


@pytest.mark.parametrize("seed", range(12))
def test_frontiers_equal_their_definition(seed: int) -> None:
    """The kernel, which merges sorted lists and compares few pairs, finds equal mixtures in equal order."""
    rng = np.random.default_rng(seed)
    case = _case(rng, 24, flavours=int(rng.integers(2, 5)), states=int(rng.integers(1, 4)))

    found, number, source, flavour = frontiers(*case.values())

    every: list[list[Mixture]] = []
    for window, parent in enumerate(case["parent"].tolist()):
        every.append(_defined(case, window, every[parent] if parent >= 0 else [([0.0] * COLUMNS, 0, -1, -1)]))
        count = int(number[window])
        assert count == len(every[window])
        assert found[window, :count].tolist() == [columns for columns, *_ in every[window]]
        if parent >= 0:
            assert source[window, :count].tolist() == [old for _, _, old, _ in every[window]]
        assert flavour[window, :count].tolist() == [own for *_, own in every[window]]
    assert max(map(len, every)) > 2, "there are some"


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
@pytest.mark.parametrize("num_stages", [1, 3, 8])
def test_lengths_that_cannot_fit_are_skipped(name: str, num_stages: int) -> None:
    """Cuts of a long chain equal those found with all lengths at once, from infeasible to loose limits."""
    found, choice = tables(name), good_choice(name, "train")
    short = lowered_bytes(found, choice)
    middle = len(short.chain) // 2
    chain = (*short.chain[:middle], *(short.chain[middle],) * 40, *short.chain[middle:])
    memory = replace(short, chain=chain, shared=())
    totals, pipeline = found.block_seconds(choice), Pipeline(num_stages, 16, "1f1b")
    least, most = (
        memory.peak(0, len(chain), pipeline.in_flight(0), (flavour,) * len(chain))
        for flavour in (memory.flavours[-1], memory.flavours[0])
    )
    fitting = 0
    for limit in [*np.linspace(0.3 * least / num_stages, least, 5), 0.5 * (least + most)]:
        every = windows(symbols_for(memory, FREE), len(chain), num_stages == 1)
        stages = fitting_stages(every, totals, memory, pipeline, min(limit, UNLIMITED), FREE)
        whole = _best_cut(stages, totals, chain, pipeline, 0.0)

        split = best_split(totals, memory, pipeline, limit, 0.0)

        assert (split is None) == (whole is None)
        if split is not None and whole is not None:
            assert split[1].seconds == pytest.approx(whole[1].seconds, rel=1e-9)
            fitting += 1
    assert 0 < fitting < 6


def test_long_stages_of_small_blocks_are_tried() -> None:
    """4 large and 40 small blocks, no stage holds two large ones: one stage has a large and all small ones."""
    chain = (0, 0, 0, 0, *(1,) * 40)
    memory = replace(ChainBytes.nothing(chain), resident=np.array([10.0, 0.1]))
    totals = np.zeros((2, len(Slot)))
    totals[:, Slot.FORWARD] = 1.0

    found = best_split(totals, memory, Pipeline(4, 8, "1f1b"), 15.0, 0.0)

    assert found is not None
    assert found[0].ranges == ((0, 1), (1, 2), (2, 3), (3, 44))
