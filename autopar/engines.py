"""What a caller says about the processes of a command: how many, and whether here or on a Ray cluster."""

from dataclasses import dataclass
from importlib.util import find_spec

from autopar.errors import JobError, WorkerError

ENGINES = ("local", "ray")


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Processes that a caller asks for.

    Attributes:
        name: "local" or "ray".
        workers: Number of processes; None for this process alone, or with Ray for one per CPU of the cluster.
        address: With Ray, the address of a running cluster, "auto" for the cluster of this machine; None starts a
            cluster on this machine.

    Raises:
        JobError: If the engine is unknown, the number of workers is below 1, or an address is given without Ray.
        WorkerError: If Ray is not installed.
    """

    name: str = "local"
    workers: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise JobError(f"no engine {self.name!r}", hint=f"use {' or '.join(ENGINES)}")
        if self.workers is not None and self.workers < 1:
            raise JobError(f"{self.workers} workers", hint="--workers takes a whole number from 1 on")
        if self.address is not None and self.name != "ray":
            raise JobError(f"a Ray address {self.address!r} for engine {self.name}", hint="add --engine ray")
        if self.name == "ray" and find_spec("ray") is None:
            raise WorkerError("Ray is not installed", hint="pip install 'autopar[ray]', or use --workers N")
