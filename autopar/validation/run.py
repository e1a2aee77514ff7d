"""Rows predicted, in one process or several; whatever has been done when it is stopped is kept."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from autopar import models
from autopar.cluster import Device
from autopar.cost import IDEAL, Stack
from autopar.cost.reserve import context_of, gaps_of
from autopar.errors import AutoparError, WorkerError
from autopar.machine import follow_parent
from autopar.models.spec import Config
from autopar.prediction import Prediction, Predictor
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.simulate.timeline import Timeline
from autopar.training import Lora
from autopar.validation.completion import InexpressibleError
from autopar.validation.express import Case, express
from autopar.validation.records import MemoryKind, MemoryRank, Row
from autopar.workload import ZOO, Workload

_KEPT = 4
"""Predictors kept per process: rows of one model come one after the other."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a row.

    Attributes:
        row: The row.
        reason: Why it could not be predicted; "" if it was.
        predicted: Predicted seconds of a step; None if there are none.
        measured: Measured seconds of a step; None if there are none.
        stack: Name of the stack.
        assumptions: What the row does not state and was assumed.
        peak_bytes: Predicted bytes on the fullest device: those that are allocated.
        shown_bytes: Predicted bytes as the row counts them: on the rank it is of, with gaps and context where it does.
        fits: Whether they are within the device's memory, less a reserve.
        has_experts: Whether the model is a mixture of experts.
        has_adapters: Whether adapters were trained in place of the model.
    """

    row: Row
    reason: str = ""
    predicted: float | None = None
    measured: float | None = None
    stack: str = ""
    assumptions: tuple[str, ...] = ()
    peak_bytes: float = 0.0
    fits: bool = True
    has_experts: bool = False
    has_adapters: bool = False
    shown_bytes: float = 0.0

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak memory, less 1; None if there is none of either."""
        measured = self.row.memory_bytes
        return self.shown_bytes / measured - 1 if measured and self.predicted is not None else None

    @property
    def error(self) -> float:
        """Predicted over measured, less 1; only of rows that were predicted."""
        assert self.predicted is not None, self.row.id
        assert self.measured is not None, self.row.id
        return self.predicted / self.measured - 1


@lru_cache(maxsize=_KEPT)
def predictor(family: str, config: Config, cache_dir: str | Path | None, lora: Lora | None = None) -> Predictor:
    """Return the predictor of a model; programs are not checked again, since the recipes are by tests."""
    proto = models.build_config(family, config)
    return Predictor(Workload(ZOO + family, proto, "train", {}, "auto", "adam", lora=lora), cache_dir, verify=False)


def predict_case(case: Case, stack: Stack, cache_dir: str | Path | None = None) -> tuple[Case, Prediction]:
    """Return what a case comes to, and the case with the recompute that was taken.

    Raises:
        JobError: If model, degrees and cluster do not fit each other.
    """
    machine = predictor(case.family, case.config, cache_dir, case.lora)  # type: ignore[arg-type]  # frozen
    for recompute in (case.degrees.recompute, *case.lighter):
        case = replace(case, degrees=replace(case.degrees, recompute=recompute))
        found = machine.predict(case.degrees, case.cluster, stack, policy=case.policy, first_layers=case.first_layers)
        if found.fits:
            break
    return case, found


def predict_row(row: Row, cache_dir: str | Path | None = None, stacks: Sequence[Stack] = ()) -> Outcome:
    """Return what becomes of a row.

    Args:
        row: The row.
        cache_dir: Where discovered rules are kept between runs.
        stacks: Stacks that take the place of bundled ones of their names.
    """
    try:
        case = express(row)
        stack = next((own for own in stacks if own.name == case.stack.name), case.stack)
        _, found = predict_case(case, stack, cache_dir)
    except InexpressibleError as why:
        return Outcome(row, str(why))
    except AutoparError as error:
        return Outcome(row, str(error.args[0]))
    return Outcome(
        row, "", found.timeline.step_seconds, case.seconds, stack.name, case.assumptions, found.timeline.peak_bytes,
        found.fits, case.has_experts, case.lora is not None,
        shown_bytes(row.memory_kind, rank_bytes(row.memory_rank, found.timeline), case.cluster.device, stack),
    )  # fmt: skip


def rank_bytes(rank: MemoryRank, timeline: Timeline) -> float:
    """Return the bytes that are allocated at most on the rank that a figure is of.

    Groups of devices come in the order of their first stage; where stages lie as a V, the first group has the last one.
    """
    match rank:
        case "first":
            return timeline.stages[0].memory.bytes
        case "last":
            return timeline.stages[-1].memory.bytes
        case "fullest":
            return timeline.peak_bytes


def shown_bytes(kind: MemoryKind, allocated: float, device: Device, stack: Stack = IDEAL) -> float:
    """Return the bytes that a source would print of so many allocated ones."""
    gaps = gaps_of(allocated, device.memory, stack.gaps, stack.outside)
    context = context_of(device.memory, stack.outside)
    return allocated + {"allocated": 0.0, "reserved": gaps, "device": gaps + context}[kind]


def _predict_rows(rows: Sequence[Row], cache_dir: str | Path | None, stacks: Sequence[Stack]) -> list[Outcome]:
    return [predict_row(row, cache_dir, stacks) for row in rows]


def batches(rows: Sequence[Row]) -> list[list[Row]]:
    """Return rows by model, so that a process that has one opens it once."""
    by_model: dict[object, list[Row]] = {}
    for row in rows:
        key = (row.arch, row.layers, row.hidden, row.heads, row.kv_heads, row.ffn, row.vocab, row.seq, row.num_experts)
        by_model.setdefault(key, []).append(row)
    found = []
    for group in by_model.values():
        group.sort(key=lambda row: (row.tp or 0, row.dp or 0, row.micro_batch or 0, row.pp or 0))
        found += [group[start : start + 24] for start in range(0, len(group), 24)]
    return found


def predict_rows(
    rows: Sequence[Row],
    *,
    cache_dir: str | Path | None = None,
    stacks: Sequence[Stack] = (),
    workers: int = 1,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
) -> Iterator[Outcome]:
    """Yield what becomes of rows, as it becomes known; once stopped, nothing more.

    Args:
        rows: The rows.
        cache_dir: Where discovered rules are kept between runs.
        stacks: Stacks that take the place of bundled ones of their names.
        workers: Processes.
        progress: Told how many rows are done.
        should_stop: Polled.

    Raises:
        WorkerError: If a process is killed.
    """
    groups, done = batches(rows), 0
    if workers == 1:
        for row in (row for group in groups for row in group):
            if should_stop():
                return
            yield predict_row(row, cache_dir, stacks)
            done += 1
            progress(Progress("predict", done, len(rows), detail=row.id))
        return
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=follow_parent)
    try:
        futures: set[Future[list[Outcome]]] = {
            pool.submit(_predict_rows, group, cache_dir, tuple(stacks)) for group in groups
        }
        while futures and not should_stop():
            finished, futures = wait(futures, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                outcomes = future.result()
                yield from outcomes
                done += len(outcomes)
                progress(Progress("predict", done, len(rows), detail=outcomes[-1].row.id))
    except BrokenProcessPool:
        raise WorkerError("a process was killed", hint="out of memory? use fewer --workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
