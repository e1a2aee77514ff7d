"""Whether a model fits on a number of devices: the memory of the usual layouts, rank by rank, by the formula."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from autopar.cluster import Cluster
from autopar.configuration import divisors
from autopar.cost import default_limit, stage_limit
from autopar.degrees import Degrees
from autopar.errors import JobError, TacticError
from autopar.estimates.estimator import Estimator
from autopar.estimates.layouts import Layout, usual_layouts
from autopar.formulate.step_time import model_flops
from autopar.prediction import Setting
from autopar.progress import StopCallback, never
from autopar.recompute import Recompute
from autopar.task import check_request, job_machine
from autopar.workload import default_batch

_FLAVOURS = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
"""What is tried, in this order, until a layout fits: each keeps less of the forward and runs more of it again."""


@dataclass(frozen=True, slots=True)
class LayoutFit:
    """What one layout comes to.

    Attributes:
        name: What people call the layout.
        degrees: The plan, with the least recompute it fits with; with full recompute if it does not fit.
        peak_bytes: Bytes at the fullest moment of each group of devices of the pipeline; a group's ranks are alike.
        limits: Bytes each group may use.
        step_seconds: Seconds of a step, by the planner's formula.
        mfu: Model FLOPs over what the devices could do at their peak in that time.
        largest_microbatch: Most samples per microbatch and data-parallel device that fit with any recompute; 0 if not
            even one does, None if it was not asked for.
    """

    name: str
    degrees: Degrees
    peak_bytes: tuple[float, ...]
    limits: tuple[float, ...]
    step_seconds: float
    mfu: float
    largest_microbatch: int | None = None

    @property
    def fits(self) -> bool:
        """Whether no rank is above its limit."""
        return all(peak <= limit for peak, limit in zip(self.peak_bytes, self.limits, strict=True))

    @property
    def fullest(self) -> int:
        """Number of the group of devices that comes closest to its limit."""
        return max(range(len(self.limits)), key=lambda group: self.peak_bytes[group] / self.limits[group])


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether the usual layouts of a model fit.

    Attributes:
        model: Name of the model.
        num_parameters: Its parameters.
        cluster: The part of the cluster that is used.
        gpus: Number of devices.
        global_batch: Samples per step.
        mode: "train" or "infer".
        layouts: The layouts that the model can be split by.
        refused: The others by name, and why.
        stopped: Whether it was interrupted before all layouts were looked at.
    """

    model: str
    num_parameters: int
    cluster: Cluster
    gpus: int
    global_batch: int
    mode: str
    layouts: tuple[LayoutFit, ...]
    refused: tuple[tuple[str, str], ...]
    stopped: bool = False


def fit_layouts(
    setting: Setting,
    gpus: int,
    *,
    global_batch: int | None = None,
    microbatch: int = 1,
    memory_limit: float | None = None,
    max_batch: bool = False,
    should_stop: StopCallback = never,
) -> Fit:
    """Return which of the usual layouts fit, with the least recompute each needs.

    Args:
        setting: Model, hardware and software.
        gpus: Number of devices.
        global_batch: Samples per step; None for the published batch of a zoo model, else 8 per device.
        microbatch: Samples per microbatch and data-parallel device.
        memory_limit: Bytes per device; None for most of each device's memory.
        max_batch: Whether to find the largest microbatch of each layout, too.
        should_stop: Polled between layouts.

    Raises:
        ClusterError: If the cluster has fewer devices.
        JobError: If no usual layout can be stated for the model, or a number is wrong.
    """
    workload = setting.predictor.workload
    machine = job_machine(gpus, setting.cluster)
    batch = global_batch or default_batch(workload, gpus)
    check_request(gpus, machine, batch, memory_limit)
    fixed = workload.fixed_batch
    folded = workload.folded(fixed or 1)
    experts = gcd(*(item.value.shape[0] for item in folded.parameters if len(item.value.shape) == 3)) or 1
    estimator = Estimator(setting.predictor, setting.cluster, setting.stack, setting.policy)
    flops = model_flops(folded) * batch / (fixed or 1)
    asked = _Asked(
        estimator, machine, memory_limit or default_limit(machine), flops,
        machine.total_peak(setting.policy.numbers, gpus), workload.mode == "train",
    )  # fmt: skip
    layouts: list[LayoutFit] = []
    refused: list[tuple[str, str]] = []
    checked: set[tuple[int, int]] = set()
    stopped = False
    for layout in usual_layouts(gpus, machine.devices_per_node, batch, trains=asked.trains, experts=experts):
        stopped = should_stop()
        if stopped:
            break
        samples = max(1, fixed // layout.degrees.dp) if fixed is not None else microbatch
        try:
            sized = replace(layout.degrees, microbatch=samples)
            if (sized.tp, sized.ep) not in checked:  # the other degrees do not change what they split
                estimator.check(sized)
                checked.add((sized.tp, sized.ep))
            found = asked.least_recompute(Layout(layout.name, sized))
            layouts.append(replace(found, largest_microbatch=asked.largest(sized)) if max_batch else found)
        except (JobError, TacticError) as error:
            refused.append((layout.name, error.args[0]))
    if not layouts and not stopped:
        name, why = refused[0] if refused else ("data parallel", f"a global batch of {batch} does not divide")
        raise JobError(
            f"no usual layout splits {workload.info().name} over {gpus} devices; {name}: {why}",
            hint="another --gpus or --global-batch; autopar solve searches all layouts",
        )
    info = workload.info()
    return Fit(
        info.name, info.num_parameters, machine, gpus, batch, workload.mode, tuple(layouts), tuple(refused), stopped
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question whether layouts fit: what prices them, and what they have."""

    estimator: Estimator
    machine: Cluster
    limit: float
    flops: float
    peak_flops: float
    trains: bool

    def least_recompute(self, layout: Layout) -> LayoutFit:
        """Return what a layout comes to with the least recompute with which it fits, else with the most."""
        found = None
        for found in self._flavours(layout):
            if found.fits:
                break
        assert found is not None, "there is at least one flavour"
        return found

    def largest(self, degrees: Degrees) -> int:
        """Return the largest microbatch with which a layout fits with full recompute; 0 if none does.

        More samples take no less memory, so that the sizes the global batch allows are halved until the last that fits.
        """
        flavour = _FLAVOURS[-1] if self.trains else Recompute.NONE
        sizes = self._sizes(degrees)
        low, high = 0, len(sizes)  # sizes[:low] fit, sizes[high:] do not
        while low < high:
            middle = (low + high) // 2
            sized = replace(degrees, microbatch=sizes[middle], recompute=str(flavour))
            try:
                peaks = self.estimator.peaks(sized)
                fits = all(peak <= limit for peak, limit in zip(peaks, self._limits(sized), strict=True))
            except JobError:  # too few microbatches for the schedule
                fits = False
            low, high = (middle + 1, high) if fits else (low, middle)
        return sizes[low - 1] if low else 0

    def _sizes(self, degrees: Degrees) -> Sequence[int]:
        fixed = self.estimator.predictor.workload.fixed_batch
        return [degrees.microbatch] if fixed is not None else divisors(degrees.global_batch // degrees.dp)

    def _flavours(self, layout: Layout) -> Iterator[LayoutFit]:
        for flavour in _FLAVOURS if self.trains else (Recompute.NONE,):
            degrees = replace(layout.degrees, recompute=str(flavour))
            peaks = tuple(map(float, self.estimator.peaks(degrees)))
            seconds = float(self.estimator.estimate([degrees]).step_seconds[0])
            mfu = self.flops / (seconds * self.peak_flops)
            yield LayoutFit(layout.name, degrees, peaks, self._limits(degrees), seconds, mfu)

    def _limits(self, degrees: Degrees) -> tuple[float, ...]:
        size = degrees.gpus // degrees.pp
        return tuple(
            stage_limit(self.machine, self.limit, range(group * size, (group + 1) * size))
            for group in range(degrees.pp)
        )
