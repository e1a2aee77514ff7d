"""One model on several clusters and numbers of GPUs: the best plan of each, what it takes and what it costs."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster, load_cluster
from autopar.errors import ClusterError, InterruptedSearchError, JobError
from autopar.least_memory_plan import shortage, thriftiest
from autopar.plan import Plan
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.request import JobRequest
from autopar.result_cache import ResultCache
from autopar.sizing.fewer import best_on_fewer, reserved
from autopar.sizing.goals import price_per_million
from autopar.sizing.planning import find_plan
from autopar.task import Effort, Task, prepare
from autopar.units import format_bytes

CELL_SECONDS = 60.0
"""Default of the longest time the plan of one cluster and number of GPUs is searched for."""

SHORTAGE_SECONDS = 10.0
"""Longest time that is spent on what is missing where nothing fits."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cluster and a number of GPUs.

    Attributes:
        cluster: The cluster as it was named.
        gpus: Number of devices.
        outcome: "plan" if one was found, "does not fit", "none found" if time ran out before there was one, "not
            possible" if the cluster or the batch cannot be divided so, "not looked at" if it was interrupted before.
        why: What is missing or in the way; "" if there is a plan.
        plan: The best plan; None without one.
        items: Tokens of a step, or samples of models without tokens.
        gpu_hour_price: Price of a GPU for an hour; None if there is none.
    """

    cluster: str
    gpus: int
    outcome: str
    why: str = ""
    plan: Plan | None = None
    items: int = 0
    gpu_hour_price: float | None = None

    @property
    def step_seconds(self) -> float | None:
        """Simulated step time; None without a plan."""
        return None if self.plan is None or self.plan.simulated is None else self.plan.simulated.step_seconds

    @property
    def items_per_second(self) -> float | None:
        """Tokens, or samples, per second."""
        return None if self.step_seconds is None else self.items / self.step_seconds

    @property
    def price_per_million(self) -> float | None:
        """Price of a million tokens, or samples; None without a plan or a price."""
        if self.step_seconds is None or self.gpu_hour_price is None:
            return None
        return price_per_million(self.gpus * self.gpu_hour_price, self.step_seconds, self.items)

    @property
    def peak_bytes(self) -> float | None:
        """Bytes per device of the fullest stage; None without a plan."""
        if self.plan is None or self.plan.simulated is None:
            return None
        return max(stage.peak for stage in self.plan.simulated.stages)

    def to_mapping(self) -> dict[str, Any]:
        """Return its figures, the plan in one line."""
        plan = self.plan
        search = None if plan is None else plan.search
        return {
            "cluster": self.cluster,
            "gpus": self.gpus,
            "outcome": self.outcome,
            "why": self.why,
            "plan": "" if plan is None else plan.summary,
            "global_batch": None if plan is None else plan.job.global_batch,
            "step_seconds": self.step_seconds,
            "items_per_second": self.items_per_second,
            "mfu": None if plan is None or plan.simulated is None else plan.simulated.mfu,
            "peak_bytes": self.peak_bytes,
            "remarks": [] if plan is None or plan.simulated is None else [own.text for own in plan.simulated.remarks],
            "price_per_million": self.price_per_million,
            "gap": None if search is None else search.gap,
            "termination": None if search is None else search.termination,
        }


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One model on several clusters and numbers of GPUs.

    Attributes:
        model: The model as it was named.
        unit: What a step processes: "token" or "sample".
        cells: Cluster by cluster, numbers of GPUs as given.
        stopped: Whether it was interrupted.
    """

    model: str
    unit: str
    cells: tuple[Cell, ...]
    stopped: bool = False

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans found."""
        return tuple(cell.plan for cell in self.cells if cell.plan is not None)

    def to_mapping(self) -> dict[str, Any]:
        """Return all figures."""
        return {"model": self.model, "unit": self.unit, "stopped": self.stopped} | {
            "cells": [cell.to_mapping() for cell in self.cells]
        }


def whatif(
    model: str | Path,
    *,
    gpus: Sequence[int],
    clusters: Sequence[str] = ("h100",),
    gpu_hour_price: float | Mapping[str, float] | None = None,
    time_limit: float = CELL_SECONDS,
    solver: str = "auto",
    cache_dir: str | Path | None = None,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
    **request: Any,
) -> WhatIf:
    """Return the best plan of a model on each cluster with each number of GPUs.

    Args:
        model: Path of an ONNX file, or `zoo:NAME`.
        gpus: Numbers of devices.
        clusters: Preset names or YAML files.
        gpu_hour_price: Price of a GPU for an hour, of all clusters or by cluster; None for what clusters say.
        time_limit: Seconds for the search of each plan.
        solver: Solver of the placement problems.
        cache_dir: Where discovered rules and plans are kept between runs; None to keep nothing.
        progress: Told which one is looked at.
        should_stop: Polled; once true what was found so far is returned.
        request: Further fields of `JobRequest`: `mode`, `global_batch`, `dims`, `memory_limit`, `precision`, ...

    Raises:
        AutoparError: If the model, a cluster or the request is wrong.
        JobError: If no number is given or none is possible, or a price is not positive.
    """
    machines = {name: load_cluster(name) for name in dict.fromkeys(clusters)}
    numbers = tuple(dict.fromkeys(gpus))
    prices = _prices(gpu_hour_price, tuple(machines))
    if not numbers or not machines:
        raise JobError("no number of GPUs or no cluster to look at", hint="--gpus 8,16 --cluster a100,h100")
    effort = Effort(solver, 1, time_limit)
    cells: list[Cell] = []
    unit, refused = "sample", None
    total = len(machines) * len(numbers)
    for name, machine in machines.items():
        for number in numbers:
            if should_stop():
                cells.append(Cell(name, number, "not looked at"))
                continue
            progress(Progress("whatif", len(cells), total, detail=f"{number} × {name}"))
            try:
                job = JobRequest(model, gpus=number, cluster=machine, cache_dir=cache_dir, **request)
                task = prepare(job, should_stop=should_stop)
            except (JobError, ClusterError) as error:
                refused = refused or error
                cells.append(Cell(name, number, "not possible", str(error.args[0])))
                continue
            except InterruptedSearchError:
                cells.append(Cell(name, number, "not looked at"))
                continue
            cell = _cell(name, task, effort, prices.get(name, _own_price(machine, number)), cache_dir, should_stop)
            if cell.plan is not None and cell.plan.model.tokens:
                unit = "token"
            cells.append(cell)
    if refused is not None and all(cell.outcome == "not possible" for cell in cells):
        raise refused
    return WhatIf(str(model), unit, tuple(cells), should_stop())


def _own_price(machine: Cluster, gpus: int) -> float | None:
    """Return the price of a GPU for an hour that a cluster states, of different ones on average."""
    price = machine.hour_price(gpus)
    return None if price is None else price / gpus


def _prices(price: float | Mapping[str, float] | None, clusters: Sequence[str]) -> Mapping[str, float]:
    if price is None:
        return {}
    found = price if isinstance(price, Mapping) else dict.fromkeys(clusters, price)
    for name, value in found.items():
        if name not in clusters:
            raise JobError(f"a price for {name!r}, which is not asked for", hint=f"asked for: {', '.join(clusters)}")
        if not value > 0:
            raise JobError(f"a price of {value:g} for {name!r}", hint="--gpu-hour-price takes numbers above 0")
    return found


def _cell(
    name: str, task: Task, effort: Effort, price: float | None, cache_dir: str | Path | None, should_stop: StopCallback
) -> Cell:
    """Return the best plan of a task, or why there is none."""
    gpus = task.job.gpus
    cache = ResultCache(cache_dir, task, effort)
    plan = cache.answer()
    if plan is None:
        kept = reserved(task, effort)
        last = math.inf if effort.time_limit is None else time.monotonic() + effort.time_limit
        plan = find_plan(task, effort.after(kept), should_stop=should_stop).plan
        if plan is None:
            return _without(name, task, should_stop)
        plan = best_on_fewer(task, plan, effort, last, should_stop=should_stop)
        cache.keep(plan)  # a cache that cannot be written to only costs time
    items = task.job.global_batch * (plan.model.tokens or 1)
    return Cell(name, gpus, "plan", plan=plan, items=items, gpu_hour_price=price)


def _without(name: str, task: Task, should_stop: StopCallback) -> Cell:
    gpus, limit = task.job.gpus, task.job.memory_limit
    if should_stop():
        return Cell(name, gpus, "none found", "interrupted")
    thrifty = thriftiest(task, enough=limit, end=time.monotonic() + SHORTAGE_SECONDS)
    if thrifty.candidate is None:
        return Cell(name, gpus, "none found", "no plan was found, whatever the memory")
    lacking = shortage(thrifty, task)
    if lacking.over <= 0:
        return Cell(name, gpus, "none found", "a plan that fits exists: allow more time")
    why = f"{format_bytes(lacking.bytes)} per device or more, {format_bytes(lacking.over)} too much"
    return Cell(name, gpus, "does not fit", why)
