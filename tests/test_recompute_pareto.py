"""Mixtures of recompute flavours of a stage, against enumeration on lowered models."""

from itertools import product

import numpy as np
import pytest

from autopar.cost import Overlap
from autopar.discover import discover
from autopar.formulate.block_memory import ChainBytes, FloatArray
from autopar.formulate.building import build_tables
from autopar.formulate.constraints import Constraints
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.offload_costs import HostLinks, with_host
from autopar.formulate.step_time import Pipeline, Split, step_time
from autopar.formulate.tables import Slot
from autopar.pipeline_partition.block_ranges import symbols_of, windows
from autopar.pipeline_partition.recompute_pareto import mixtures, special_blocks
from autopar.pipeline_partition.stage_cuts import best_split
from autopar.recompute import BY_SECONDS, ON_DEVICE, Hosted, Recompute
from autopar.sharding import Mesh
from autopar.solvers import load
from autopar.workload import open_workload
from tests.formulations import COSTS, good_choice, lowered_bytes, random_choice, tables
from tests.test_models import TINY

MODELS = ["gpt2", "llama3-8b", "mlp-xs", "mixtral-8x7b", "resnet50"]


def _model(name: str, seed: int) -> tuple[FloatArray, ChainBytes]:
    """Return block seconds and bytes of a model under a choice, good or changed at random."""
    found = tables(name)
    choice = good_choice(name, "train")
    if seed:
        weighting = weights(found, Pipeline(1, 2, "1f1b"), recompute=Recompute.NONE, hidden=0.0, bounding=True)
        choice = random_choice(problem(found, weighting), np.random.default_rng(seed), near=choice)
    return found.block_seconds(choice), lowered_bytes(found, choice)


def _seconds(totals: FloatArray, chain: tuple[int, ...], flavours: tuple[Recompute, ...]) -> float:
    """Return t_s of a single stage."""
    split = Split(((0, len(chain)),), (flavours,))
    return float(step_time(totals, chain, Pipeline(1, 1, "1f1b"), split, 0.0).stage_seconds[0])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("in_flight", [1, 4])
def test_the_fastest_mixture_that_fits_is_found(name: str, seed: int, in_flight: int) -> None:
    """Among all mixtures of a range, at limits from the least to the most memory they need."""
    totals, memory = _model(name, seed)
    chain = memory.chain
    found = windows(symbols_of(chain, tuple(special_blocks(memory))), 4, False)
    for start, stop in {(0, 3), (1, 4), (len(chain) - 3, len(chain)), (0, min(4, len(chain)))}:
        window = found.at[start, stop - start - 1]
        every = {
            flavours: (_seconds(totals, chain[start:stop], flavours), memory.peak(start, stop, in_flight, flavours))
            for flavours in product(ON_DEVICE, repeat=stop - start)
        }
        for limit in np.quantile([peak for _, peak in every.values()], [0.0, 0.1, 0.3, 0.5, 0.8, 1.0], method="lower"):
            best = min(seconds for seconds, peak in every.values() if peak <= limit)

            mixed = mixtures(found, totals, memory, Overlap(), limit, (in_flight, in_flight))

            fits = np.flatnonzero(mixed.peaks(in_flight)[window] <= limit)
            fastest = fits[mixed.seconds[window, fits].argmin()]
            flavours = mixed.flavours(int(window), int(fastest))
            assert every[flavours][1] <= limit
            assert every[flavours][0] == pytest.approx(mixed.seconds[window, fastest], rel=1e-9)
            assert mixed.seconds[window, fastest] <= best * (1 + 1e-9)


def _linked(totals: FloatArray, memory: ChainBytes, rng: np.random.Generator) -> FloatArray:
    """Return block seconds with a host link on which copies take about as long as passes."""
    passes = totals[:, Slot.FORWARD] + totals[:, Slot.BACKWARD]
    rate = passes.sum() / max(1.0, memory.hosted.sum())
    out, back = (rate * memory.hosted * rng.uniform(0.01, 0.3) for _ in range(2))
    return with_host(totals, HostLinks(out, back, np.zeros(len(totals))), Overlap())


@pytest.mark.parametrize("name", ["gpt2", "mlp-xs"])
@pytest.mark.parametrize("share", [np.inf, 0.4])
def test_the_fastest_mixture_with_host_memory_is_found(name: str, share: float) -> None:
    """The same where blocks may offload, also where their host has room for a part of what they save only.

    With few microbatches in flight what is under way takes more than what is gone.
    """
    in_flight = 8
    found, choice = tables(name), good_choice(name, "train")
    room = share * in_flight * float(lowered_bytes(found, choice).hosted[list(found.folded.chain[1:4])].sum())
    memory = lowered_bytes(found, choice, BY_SECONDS, room)
    totals = _linked(found.block_seconds(choice), memory, np.random.default_rng(in_flight))
    chain = memory.chain
    known = windows(symbols_of(chain, tuple(special_blocks(memory))), 3, False)
    constraints = Constraints(hosted=frozenset({Hosted.ACTIVATIONS}))
    offloaded = 0
    for start, stop in {(0, 3), (1, 4), (len(chain) - 3, len(chain))}:
        window = known.at[start, stop - start - 1]
        every = {
            flavours: (_seconds(totals, chain[start:stop], flavours), memory.peak(start, stop, in_flight, flavours))
            for flavours in product(BY_SECONDS, repeat=stop - start)
            if memory.host_bytes(start, stop, in_flight, flavours) <= room
        }
        for limit in np.quantile([peak for _, peak in every.values()], [0.0, 0.1, 0.3, 0.5, 0.8], method="lower"):
            best = min(seconds for seconds, peak in every.values() if peak <= limit)

            mixed = mixtures(known, totals, memory, Overlap(), limit, (in_flight, in_flight), constraints)

            fits = np.flatnonzero(
                (mixed.peaks(in_flight)[window] <= limit) & (mixed.host_bytes(in_flight)[window] <= room)
            )
            fastest = fits[mixed.seconds[window, fits].argmin()]
            flavours = mixed.flavours(int(window), int(fastest))
            assert every[flavours][1] <= limit
            assert every[flavours][0] == pytest.approx(mixed.seconds[window, fastest], rel=1e-9)
            assert mixed.seconds[window, fastest] <= best * (1 + 1e-9)
            offloaded += Recompute.OFFLOAD in flavours
    assert offloaded, "some of the best mixtures offload"


def test_thinning_keeps_the_fastest_mixtures_of_a_long_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 equal layers: at each limit the best number of each flavour, though thinned from many mixtures."""
    model = open_workload("zoo:gpt2", mode="train", dims=TINY["gpt2"] | {"num_layers": 48})
    found = build_tables(model.folded(8), discover(model.probe), Mesh.of(inner=2), COSTS)
    pipeline = Pipeline(1, 1, "1f1b")
    instance = problem(found, weights(found, pipeline, recompute=Recompute.NONE, hidden=1.0, bounding=False))
    choice = load("auto").solve(instance).choice
    assert choice is not None
    totals, memory = found.block_seconds(choice), lowered_bytes(found, choice)
    count, (before, after) = memory.chain.count(1), (memory.chain.index(1), memory.chain[::-1].index(1))
    none, selective, full = ON_DEVICE
    every = []
    for many in range(count + 1):
        for few in range(count + 1 - many):
            layers = (full,) * many + (selective,) * few + (none,) * (count - many - few)
            flavours = (none,) * before + layers + (none,) * after
            split = Split(((0, len(memory.chain)),), (flavours,))
            seconds = step_time(totals, memory.chain, pipeline, split, 0.0).seconds
            every.append((seconds, memory.peak(0, len(memory.chain), 1, flavours)))
    peaks = np.array([peak for _, peak in every])

    def worse(limit: float) -> float:
        best = min(seconds for seconds, peak in every if peak <= limit)
        plan = best_split(totals, memory, pipeline, limit, 0.0)
        assert plan is not None
        return plan[1].seconds / best - 1

    limits = np.quantile(peaks, [0.02, 0.1, 0.3, 0.5, 0.7, 0.9])
    assert max(map(worse, limits)) < 1e-9
    monkeypatch.setattr("autopar.pipeline_partition.recompute_pareto.MOST_MIXTURES", 16)
    monkeypatch.setattr("autopar.pipeline_partition.recompute_pareto.MOST_MIXTURES_OF_ALL", 0)
    assert max(map(worse, limits)) > 1e-4, "of few that are kept the best is not among them"
