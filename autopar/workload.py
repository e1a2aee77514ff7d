"""A model as the planner sees it: graph, training step and distinct blocks for any number of samples."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from autopar import huggingface, models
from autopar.collector import uncollected
from autopar.cost import IDEAL, Fusion, Stack, stack_from_dict
from autopar.discover import Rules, discover
from autopar.errors import JobError, ModelError, PlanError, UnsupportedOpError, stopped
from autopar.folding.fold import Folded, fold
from autopar.folding.layer_excerpt import Excerpt, excerpt
from autopar.folding.resize import Resizer, SizedExcerpt, place_blocks
from autopar.formulate.agreement import check_blocks
from autopar.formulate.manual_recipes import batch_dims
from autopar.ir.blocks import Cut, cut
from autopar.ir.caches import caches_of
from autopar.ir.graph import Graph, Value
from autopar.ir.linear import mark_linear
from autopar.ir.relays import with_relays
from autopar.onnx import load
from autopar.onnx.abridge import abridged
from autopar.onnx.content import content_digest
from autopar.onnx.importer import import_model
from autopar.onnx.reader import Source, read
from autopar.plan import DimSize, Job, ModelInfo, Plan
from autopar.progress import ProgressCallback, StopCallback, never, silent
from autopar.training import ADAPTER_CONFIG, NO_LORA, Lora, add_adapters, read_lora, training_step
from autopar.training.batch_norm import NORMALIZATION

if TYPE_CHECKING:
    import onnx

ZOO = "zoo:"
HUGGING_FACE = "hf:"

_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
"""Ops whose dim 0 is time unless they say otherwise."""

_PROBES = (6, 10, 14, 22, 26, 34, 38, 46)
"""Microbatch sizes to discover rules at: even, so that they can be sharded, and unlike the sizes models have."""


@dataclass(eq=False)
class Workload:
    """One model under one job; graphs are made once per microbatch size, most of them from one that is built whole.

    Attributes:
        source: File path, `zoo:NAME` or `hf:PATH`, as the user gave it.
        model: What is imported: the path, or the model itself.
        mode: "train" or "infer".
        dims: Dynamic dims of the file, or fields of the zoo model's configuration, set by the user.
        loss: Loss of the training step.
        optimizer: Optimizer of the training step.
        sync_batchnorm: Whether devices that share a batch normalise it with statistics of all of it in training.
        fusion: What the stack fuses of element-wise ops; fused kernels keep less for the backward.
        lora: Adapters beside the model, whose own parameters are then frozen; None without.
        global_batch: Samples of a step, whose caches are all in memory; 0 if a microbatch is a step.
        should_stop: Polled while a graph is made; once true, that ends in an `InterruptedSearchError`.
    """

    source: str
    model: "str | Path | onnx.ModelProto"
    mode: str
    dims: Mapping[str, DimSize]
    loss: str
    optimizer: str
    sync_batchnorm: bool = False
    fusion: Fusion = "chains"
    lora: Lora | None = None
    global_batch: int = 0
    should_stop: StopCallback = never
    _folded: dict[int, Folded] = field(default_factory=dict, repr=False)
    _held: dict[tuple[int, int], Folded] = field(default_factory=dict, repr=False)
    _built: "list[_Built]" = field(default_factory=list, repr=False)

    def forward(self, samples: int | None) -> Graph:
        """Return the imported graph for a number of samples, or for the number it was exported with.

        Raises:
            ModelError: If the model cannot be imported, or not with that number.
            JobError: If adapters are to be beside what is not there.
        """
        return self.adapted(load(self.model, dims=self.bound, batch=samples, should_stop=self.should_stop))

    def adapted(self, forward: Graph) -> Graph:
        """Return a forward graph with the adapters of the job."""
        return forward if self.lora is None else add_adapters(forward, self.lora)

    @contextmanager
    def stoppable(self, should_stop: StopCallback) -> Iterator[None]:
        """Let something poll whether it should stop while graphs are made."""
        before, self.should_stop = self.should_stop, should_stop
        try:
            yield
        finally:
            self.should_stop = before

    @property
    def bound(self) -> Mapping[str, DimSize]:
        """Sizes of dynamic dims of what is imported."""
        # What --set names on such a model went into its builder; it has no dynamic dim but the batch.
        return {} if self.source.startswith((ZOO, HUGGING_FACE)) else self.dims

    def proto(self) -> "onnx.ModelProto":
        """Return the model as it was before the import.

        Raises:
            ModelError: If it cannot be read.
        """
        return read(self.model).model

    @cached_property
    def content(self) -> str:
        """A hash of the model's content: models of the same hash are imported alike, wherever they lie."""
        return content_digest(read(self.model))

    def graph(self, samples: int) -> Graph:
        """Return the graph of a microbatch with blocks found, the whole step in training mode.

        Raises:
            ModelError: If the model cannot be imported.
            UnsupportedOpError: If an op cannot be differentiated.
        """
        with uncollected():
            return self.step(self._cut(samples).graph)

    def _cut(self, samples: int) -> Cut:
        forward = self.forward(None if samples == self.fixed_batch else samples)
        self._poll()
        return cut(forward)

    def _poll(self) -> None:
        if self.should_stop():
            raise stopped()

    def step(self, graph: Graph) -> Graph:
        """Return what is run for a forward graph with blocks."""
        graph = with_relays(graph)
        if self.mode == "train":
            self._check_trained(graph)
            graph = training_step(
                graph,
                loss=self.loss,
                optimizer=self.optimizer,
                sync_batchnorm=self.synchronises_batchnorm,
                fused=self.fusion == "chains",
            )
        return mark_linear(graph)

    def _check_trained(self, graph: Graph) -> None:
        """Refuse to train a step of decoding.

        Raises:
            JobError: If the graph reads caches.
        """
        inputs = frozenset(graph.inputs)
        for op in graph.ops:
            for _, name in caches_of(op):
                if name in inputs:
                    raise JobError(
                        f"{self.source} is a step of decoding, which reads the cache {name!r} and is not trained",
                        hint="--mode infer",
                    )

    @cached_property
    def synchronises_batchnorm(self) -> bool:
        """Whether no device normalises a part of a batch on its own: asked for, or nothing is normalised over it."""
        if self.sync_batchnorm or self.mode != "train":
            return True
        model = self.proto()
        nodes = (node for graph in (model.graph, *model.functions) for node in graph.node)
        return all(node.op_type != NORMALIZATION for node in nodes)

    def folded(self, samples: int, microbatches: int = 0) -> Folded:
        """Return the distinct blocks of a microbatch, made from those of another size where that is the same.

        Args:
            samples: Samples of the microbatch.
            microbatches: Microbatches of a step, whose caches are all in memory; 0 for those of `global_batch`.
        """
        if samples not in self._folded:
            with uncollected():
                self._folded[samples] = self._resized(samples) or self._build(samples)
        found, count = self._folded[samples], microbatches or max(1, self.global_batch // samples)
        if count == 1 or not self.has_caches:
            return found
        if (samples, count) not in self._held:
            self._held[samples, count] = replace(found, microbatches=count)
        return self._held[samples, count]

    @cached_property
    def has_caches(self) -> bool:
        """Whether the model is a step of decoding, which reads what earlier tokens left."""
        folded = next(iter(self._folded.values()))
        return any(True for kind in folded.kinds for op in kind.ops for _ in folded.caches_of(op))

    def _build(self, samples: int) -> Folded:
        """Import and fold the whole model."""
        found = self._cut(samples)
        self._poll()
        step = self.step(found.graph)
        self._poll()
        folded = fold(step)
        folded = replace(folded, batch_dims=self._inner_batch_dims(found.graph, folded, samples))
        self._built.append(_Built(self, samples, found, folded))
        return folded

    def _inner_batch_dims(self, forward: Graph, folded: Folded, samples: int) -> dict[str, int]:
        """Return the batch dim of activations of representatives that have it after dim 0; empty for most models.

        It is the first dim that differs from the same model with twice the samples.
        """
        if not _has_inner_batch(forward):
            return {}
        if self.fixed_batch is not None:
            dims: Mapping[str, int] = _dims_of_size(forward.values, self.fixed_batch)
        else:
            dims = batch_dims(forward.values, self.forward(2 * samples).values)
        names = (name for kind in folded.kinds for op in kind.ops for name in op.outputs if name in forward.values)
        return {name: dims[name] for name in names if dims.get(name, 0) > 0}

    def _resized(self, samples: int) -> Folded | None:
        """Return the distinct blocks as an excerpt of the model tells them; None if it does not."""
        found = (built.resized(samples) for built in self._built)
        return next((folded for folded in found if folded is not None), None)

    @cached_property
    def fixed_batch(self) -> int | None:
        """Samples the model insists on; None if it takes any number.

        That is the number it was exported for if its constants depend on it, or the number the user set its batch dim
        to.
        """
        if self.source.startswith(ZOO):
            return None
        try:
            exported = self.forward(None)
        except ModelError:
            self.forward(
                1
            )  # the batch is for the planner to choose; whatever else is wrong with the model is said here
            return None
        size = int(exported.metadata.get("batch", "1"))
        if size in self.dims.values() and "batch" in exported.metadata:
            return size
        try:
            self.forward(2 * size)
        except ModelError:
            return size
        return None

    def batch_dims(self, samples: int) -> Mapping[str, int]:
        """Return the batch dim of every value of a microbatch that has one."""
        values = self.folded(samples).graph.values
        if self.fixed_batch is not None:
            return _dims_of_size(values, self.fixed_batch)
        # A microbatch as large as the probe differs from it nowhere, but from one twice as large.
        return batch_dims(values, self.probe.values) or batch_dims(values, self.folded(2 * samples).graph.values)

    def batch_dims_of(self, folded: Folded) -> Mapping[str, int]:
        """Return the same for one of the graphs that `folded` has returned."""
        known = [*self._folded.items(), *((samples, own) for (samples, _), own in self._held.items())]
        return self.batch_dims(next(samples for samples, own in known if own is folded))

    def rules(self, *, cache_dir: str | Path | None = None, progress: ProgressCallback = silent) -> Rules:
        """Return how each op can be sharded; of blocks that are alike one is looked at.

        Args:
            cache_dir: Where discovered rules are kept between runs; None to keep nothing.
            progress: Called after each distinct op.

        Raises:
            UnsupportedOpError: If an op has no implementation to execute.
            ExecutionError: If no process can be started.
        """
        graph, folded = self._probed
        if folded is None:
            return discover(graph, cache_dir=cache_dir, progress=progress)
        distinct = tuple(op for kind in folded.kinds for op in kind.ops)
        found = discover(replace(graph, ops=distinct), cache_dir=cache_dir, progress=progress)
        return replace(found, by_op={name: found.by_op[like] for name, like in folded.representative_names()})

    @property
    def probe(self) -> Graph:
        """The graph rules are discovered on: with a batch that no other dim of the model shares."""
        return self._probed[0]

    @cached_property
    def _probed(self) -> tuple[Graph, Folded | None]:
        """The probe, and its distinct blocks if they are known."""
        if self.fixed_batch is not None:
            folded = self.folded(self.fixed_batch)
            return folded.graph, folded
        samples = [built.sample(1) for built in self._built if built.resizing is not None]
        smallest = next((sample.forward for sample in samples if sample is not None), None)
        if smallest is None:
            smallest = self.forward(1)  # its backward has the same dims
        sizes = {size for value in smallest.values.values() for size in value.shape}
        size = next((size for size in _PROBES if size not in sizes), _PROBES[0])
        with uncollected():
            resized = self._resized(size)
        return (self.graph(size), None) if resized is None else (resized.graph, resized)

    def info(self) -> ModelInfo:
        """Return what a plan records of the model."""
        graph = next(iter(self._folded.values())).graph
        dims = tuple(sorted((name, _recorded(value)) for name, value in self.dims.items()))
        sha256 = graph.metadata["sha256"]
        trained = graph.num_trained
        part = 0 if trained == graph.num_parameters else trained
        return ModelInfo(graph.name, self.source, sha256, graph.num_parameters, dims, _tokens(graph), part)


@dataclass(eq=False)
class _Built:
    """A model that was built whole for one microbatch size, and the excerpt of it that tells other sizes.

    Attributes:
        workload: The model.
        samples: The microbatch size.
        cut: Its forward graph, cut into blocks.
        folded: Its distinct blocks.
    """

    workload: Workload
    samples: int
    cut: Cut
    folded: Folded

    @cached_property
    def excerpt(self) -> Excerpt | None:
        """What is kept of its layers; None if that would be most of them."""
        return excerpt(self.cut.graph, self.folded.chain)

    @cached_property
    def source(self) -> Source | None:
        """The excerpt as a model to be imported; None if there is none."""
        if self.excerpt is None:
            return None
        return abridged(read(self.workload.model), self.excerpt.joins, self.excerpt.dropped)

    @cached_property
    def resizing(self) -> Resizer | None:
        """What makes other sizes; None if the excerpt does not tell them."""
        known = self.sample(self.samples)
        if known is None or self.excerpt is None:
            return None
        return Resizer.of(self.cut, self.folded, self.excerpt.kept, known)

    def resized(self, samples: int) -> Folded | None:
        """Return the distinct blocks of another microbatch size; None if the excerpt does not tell them."""
        if self.resizing is None:
            return None
        sample = self.sample(samples)
        return None if sample is None else self.resizing.at(sample)

    def sample(self, samples: int) -> SizedExcerpt | None:
        """Return the excerpt for a number of samples; None if it cannot be built, and the whole has to say why."""
        if self.source is None or self.excerpt is None:
            return None
        try:
            imported = import_model(self.source, self.workload.bound, samples, self.workload.should_stop)
            graph = self.workload.adapted(imported)
            forward = place_blocks(graph, self.cut.graph, self.excerpt.kept)
            return None if forward is None else SizedExcerpt(forward, self.workload.step(forward))
        except (ModelError, UnsupportedOpError):
            return None


def _has_inner_batch(forward: Graph) -> bool:
    """Whether the batch is not dim 0 of an input, or of what a recurrent op computes."""
    axes: dict[str, int] = json.loads(forward.metadata.get("batch_axes", "{}"))
    return any(axes.values()) or any(op.kind in _RECURRENT and not op.attr("layout", 0) for op in forward.ops)


def _dims_of_size(values: Mapping[str, Value], size: int) -> dict[str, int]:
    """Return the first dim of a size of every value that has one."""
    return {name: value.shape.index(size) for name, value in values.items() if size in value.shape}


def _tokens(graph: Graph) -> int:
    """Return the tokens of one sample: the positions of its integer data of shape (samples, positions)."""
    axes: dict[str, int] = json.loads(graph.metadata.get("batch_axes", "{}"))
    data = [graph.values[name] for name in graph.inputs if not graph.values[name].is_float]
    return max((value.shape[1 - axes.get(value.name, 0)] for value in data if len(value.shape) == 2), default=0)


def job_stack(job: Job) -> Stack:
    """Return the software stack a job was planned for.

    Raises:
        StackError: If what the job holds is none.
    """
    return stack_from_dict(job.stack, "job.stack") if job.stack else IDEAL


def open_plan(plan: Plan, model: str | Path | None = None, *, cache_dir: str | Path | None = None) -> Workload:
    """Return the model a plan was made for.

    Args:
        plan: A plan, solved or read from a file.
        model: Where the model is now; None for where it was.
        cache_dir: Where exported Hugging Face models are kept between runs; None to keep nothing.

    Raises:
        ModelError: If there is no such model.
        PlanError: If it is another one than the plan was made for, or the plan does not place its ops.
    """
    job = plan.job
    source = model or plan.model.source
    workload = open_workload(
        source,
        mode=job.mode,
        dims=dict(plan.model.dims),
        loss=job.loss,
        optimizer=job.optimizer,
        sync_batchnorm=job.sync_batchnorm,
        fusion=job_stack(job).fusion,
        lora=job.lora or NO_LORA,
        cache_dir=cache_dir,
    )
    workload.global_batch = job.global_batch
    folded = workload.folded(plan.microbatch)  # the model's numbers are known once it is imported
    if workload.info().sha256 != plan.model.sha256:
        raise PlanError(
            f"{workload.source!r} is not the model the plan was made for (its hash differs)",
            hint="solve again, or pass the original file with --model",
        )
    check_blocks(plan, folded)
    return workload


def open_workload(
    model: str | Path,
    *,
    mode: str = "train",
    dims: Mapping[str, DimSize | list[int]] | None = None,
    loss: str = "auto",
    optimizer: str = "adam",
    sync_batchnorm: bool = False,
    fusion: Fusion = "chains",
    lora: str | Path | Lora | None = None,
    cache_dir: str | Path | None = None,
) -> Workload:
    """Return the workload of a model file, of a zoo model, or of a Hugging Face configuration.

    Args:
        model: Path of an ONNX file, `zoo:NAME`, `hf:config.json` or `hf:FOLDER`.
        mode: "train" or "infer".
        dims: Dynamic dims by name; for zoo models fields of the configuration, for Hugging Face `seq`.
        loss: Loss of the training step.
        optimizer: Optimizer of the training step.
        sync_batchnorm: Whether devices that share a batch normalise it with statistics of all of it in training; else
            each with those of its own samples, as frameworks do by default.
        fusion: What the stack fuses of element-wise ops.
        lora: Adapters to be trained in place of the model, as `autopar.training.read_lora` takes them; None for those
            of an `adapter_config.json` in the folder of a Hugging Face model, if there is one.
        cache_dir: Where exported Hugging Face models are kept between runs; None to keep nothing.

    Raises:
        JobError: If the mode is unknown, or the adapters are not described as they have to be.
        ModelError: If there is no such model, or the configuration cannot be exported.
    """
    if mode not in ("train", "infer"):
        raise JobError(f"unknown mode {mode!r}", hint="use train or infer")
    source, bound = str(model), _tuples(dims or {})
    adapters = read_lora(_beside(source) if lora is None else lora)
    if source.startswith(ZOO):
        model = models.build(source.removeprefix(ZOO), **bound)
        return Workload(source, model, mode, bound, loss, optimizer, sync_batchnorm, fusion, adapters)
    if source.startswith(HUGGING_FACE):
        built = huggingface.build(source.removeprefix(HUGGING_FACE), bound, cache_dir)
        return Workload(source, built, mode, bound, loss, optimizer, sync_batchnorm, fusion, adapters)
    if not Path(source).exists():
        raise models.missing_model(source)
    return Workload(source, source, mode, bound, loss, optimizer, sync_batchnorm, fusion, adapters)


def _beside(source: str) -> Path | None:
    """Return the configuration of adapters in the folder of a Hugging Face model, None if there is none."""
    folder = Path(source.removeprefix(HUGGING_FACE))
    file = folder / ADAPTER_CONFIG
    return file if source.startswith(HUGGING_FACE) and folder.is_dir() and file.exists() else None


def _tuples(dims: Mapping[str, DimSize | list[int]]) -> dict[str, DimSize]:
    """Return sizes with tuples for lists, as which JSON and YAML have them."""
    return {name: tuple(size) if isinstance(size, list) else size for name, size in dims.items()}


def _recorded(size: DimSize) -> DimSize:
    """Return a size in the types that a plan is written with."""
    if isinstance(size, tuple):
        return tuple(map(int, size))
    return size if isinstance(size, float) else int(size)


def default_batch(workload: Workload, gpus: int) -> int:
    """Return the samples per step if the user does not say.

    For training the published batch of a zoo model, else 8 per GPU; for inference 1 per GPU. A multiple of what the
    model insists on.
    """
    if workload.mode == "train" and workload.source.startswith(ZOO):
        return models.spec(workload.source.removeprefix(ZOO)).global_batch
    per_gpu = 8 if workload.mode == "train" else 1
    return gpus * per_gpu * (workload.fixed_batch or 1)
