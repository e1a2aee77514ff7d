"""What a run is asked for and what it reports; all of it crosses process boundaries as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run of a plan, or of a program.

    Attributes:
        plan: Path of the plan, or of the program (`autopar.program.listing`).
        ranks: Number of processes.
        backend: "gloo" (CPU) or "nccl" (one GPU per process).
        steps: Steps to run; the first one warms up.
        model: Where the model is now; None for where it was.
        seed: Seed of weights and data.
        tolerance: Relative error allowed; None for that of the parameters' element type.
        threads: Threads per process on the CPU.
        cluster: What seconds are predicted for if a program is run: preset name or YAML file. A plan has its own.
        stack: The software stack, likewise.
        precision: What is stored in which precision, likewise.
        profile: Folder of measured events that count in place of formulas in what is predicted; None for formulas.
        pin: Whether each process stays on cores of its own.
        compare: Whether the first and the last step are held against the unpartitioned run.
    """

    plan: str
    ranks: int
    backend: str = "gloo"
    steps: int = 3
    model: str | None = None
    seed: int = 0
    tolerance: float | None = None
    threads: int = 1
    cluster: str = "h100"
    stack: str = "default"
    precision: str = "mixed"
    profile: str | None = None
    pin: bool = False
    compare: bool = True


@dataclass(frozen=True, slots=True)
class Deviation:
    """Largest difference between the ranks and the unpartitioned run.

    Attributes:
        what: "loss", "gradients", "parameters", "outputs".
        tensors: How many were compared.
        absolute: Largest error of an element; None if one is infinite or no number, in either run.
        relative: Largest error measured as `autopar.ranks.compare` says; None likewise.
        worst: The tensor with the largest relative error.
        passed: Whether that is within tolerance.
    """

    what: str
    tensors: int
    absolute: float | None
    relative: float | None
    worst: str
    passed: bool


@dataclass(frozen=True, slots=True)
class StepComparison:
    """One step held against the unpartitioned step from the same state.

    Attributes:
        step: From 1.
        loss: Mean loss over all samples, as the ranks computed it; None in inference, or if it is no number.
        deviations: What was compared.
    """

    step: int
    loss: float | None
    deviations: tuple[Deviation, ...]


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of a step on the devices of a stage, by phase (`autopar.ranks.stopwatch`).

    Attributes:
        stage: Position in the pipeline.
        measured: Mean over its ranks of the median over steps.
        predicted: By the simulator.
    """

    stage: int
    measured: Mapping[str, float]
    predicted: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunReport:
    """Result of a run.

    Attributes:
        summary: The plan or program in one line.
        model: Name of the model.
        ranks: Number of processes.
        backend: What they communicated with.
        device: What they computed on, in words.
        seed: Seed of weights and data.
        drawn: How many parameters and buffers the model gives no numbers for, so that they were drawn.
        tolerance: Relative error allowed.
        compared: The first step and the last one.
        num_models: Distinct compiled pieces on rank 0.
        measured_seconds: A step, median over the steps after the first, of the slowest rank.
        predicted_seconds: A step, by the simulator.
        first_seconds: The first step.
        unpartitioned_seconds: A step on one device.
        stages: Where the time of each stage goes.
        low_seconds: The time that a tenth of these steps stays below.
        high_seconds: The time that a tenth of them exceeds.
        measured_share: Share of the predicted seconds of ops and collectives that is of a profile; None without one.
        departed: Collectives of gradients of a step of rank 0 in the order in which they started, named as in a
            simulated timeline; a bucket of several gradients is one.
    """

    summary: str
    model: str
    ranks: int
    backend: str
    device: str
    seed: int
    drawn: int
    tolerance: float
    compared: tuple[StepComparison, ...]
    num_models: int
    measured_seconds: float
    predicted_seconds: float
    first_seconds: float
    unpartitioned_seconds: float
    stages: tuple[StageSeconds, ...]
    low_seconds: float = 0.0
    high_seconds: float = 0.0
    measured_share: float | None = None
    departed: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether everything compared is within tolerance."""
        return all(deviation.passed for step in self.compared for deviation in step.deviations)
