"""What is to be planned: the one record of a job that the planner, its baselines and sizing are asked with."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from autopar.cluster import Cluster, load_cluster
from autopar.cost import NEAREST, Stack, resolve_stack
from autopar.events import Profile
from autopar.pins import Pins
from autopar.plan import DimSize
from autopar.training import Lora
from autopar.workload import Workload, open_workload


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job as it is asked for; `autopar.solve` builds one of its arguments.

    Attributes:
        model: Path of an ONNX file, `zoo:NAME` or `hf:PATH`.
        gpus: Number of devices.
        cluster: Preset name, YAML file or record.
        mode: "train" or "infer".
        global_batch: Samples per step; None for the model's published batch, else 8 per GPU.
        dims: Dynamic dims by name; for zoo models fields of the configuration.
        memory_limit: Bytes per device a plan may use; None for most of the device's memory.
        loss: "auto", "cross-entropy", "chunked-cross-entropy", "mse" or "mean".
        optimizer: A name in `autopar.training.OPTIMIZERS`: "adam", "adamw", "adamw-8bit", "sgd",
            "lion", "muon" or "adafactor".
        sync_batchnorm: Whether devices that share a batch normalise it with statistics of all of it in training; else
            each with those of its own samples, as frameworks do by default.
        lora: Adapters to be trained in place of the model: "rank=16,targets=q:v", the path of peft's
            `adapter_config.json`, or a record; None for the one in the folder of a Hugging Face model, "none" for none.
        stack: What the software makes of the hardware: name, YAML file or record; "default" for the fitted one
            nearest to the cluster, "ideal" for what its data sheet says.
        precision: What is stored in which precision, a key of `autopar.cost.POLICIES`.
        recompute_modules: Modules that selective recompute runs again, names of
            `autopar.recompute.RECOMPUTE_MODULES`; none for what the stack says.
        shared_expert_overlap: Whether tokens travel to experts and back beside the shared experts of their layer; None
            for what the stack says.
        pins: What the plan has to keep to: a YAML file, what one holds (`{"stages": 2, "tp": [2, 4]}`), or a record.
        profile: Measured events that count in place of formulas: folder that `autopar profile` wrote, or a record;
            None for formulas alone.
        cache_dir: Where discovered rules and plans are kept between runs; None to keep nothing.
    """

    model: str | Path
    _: KW_ONLY
    gpus: int
    cluster: str | Path | Cluster = "h100"
    mode: str = "train"
    global_batch: int | None = None
    dims: Mapping[str, DimSize] | None = None
    memory_limit: float | None = None
    loss: str = "auto"
    optimizer: str = "adam"
    sync_batchnorm: bool = False
    lora: str | Path | Lora | None = None
    stack: str | Path | Stack = NEAREST
    precision: str = "mixed"
    recompute_modules: tuple[str, ...] = ()
    shared_expert_overlap: bool | None = None
    pins: str | Path | Pins | Mapping[str, object] | None = None
    profile: str | Path | Profile | None = None
    cache_dir: str | Path | None = None

    def load_cluster(self) -> Cluster:
        """Return what the job gets its devices from.

        Raises:
            ClusterError: If there is no such cluster, or its file is wrong.
        """
        return self.cluster if isinstance(self.cluster, Cluster) else load_cluster(self.cluster)

    def load_stack(self) -> Stack:
        """Return the software stack.

        Raises:
            ClusterError: If there is no such cluster, or its file is wrong.
            StackError: If there is no such stack, or its file is wrong.
        """
        stack = resolve_stack(self.stack, self.load_cluster()).recomputing(self.recompute_modules)
        return stack.overlapping_shared(self.shared_expert_overlap)

    def load_profile(self) -> Profile | None:
        """Return the measured events; None if there are none.

        Raises:
            DataError: If there is no such profile, or it is malformed.
        """
        return Profile.of(self.profile)

    def open_workload(self) -> Workload:
        """Return the model under the job; errors are those of `load_stack` and of `autopar.workload.open_workload`."""
        return open_workload(
            self.model,
            mode=self.mode,
            dims=self.dims,
            loss=self.loss,
            optimizer=self.optimizer,
            sync_batchnorm=self.sync_batchnorm,
            fusion=self.load_stack().fusion,
            lora=self.lora,
            cache_dir=self.cache_dir,
        )
