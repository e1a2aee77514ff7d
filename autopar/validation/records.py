"""Published measurements as they come: one record per row of `train.json`, in which anything may be missing.

A data folder holds `train.json` (steps of training) and may hold `comm.json`, `gemm.json`, `memory_bound_ops.json` and
`layers.json`. docs/published_steps.md lists the fields.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from autopar.errors import DataError

TRAIN = "train.json"
_IDENTITY = (
    "framework", "arch", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "num_experts", "topk",
    "moe_ffn", "global_batch", "micro_batch", "num_microbatches", "n_gpus", "gpus_per_node", "gpu", "inter", "tp", "pp",
    "cp", "ep", "dp", "vpp", "sequence_parallel", "zero", "recompute", "precision", "attention", "schedule",
)  # fmt: skip
"""Fields that say what was run, and nothing of what came out."""

GIB = 2.0**30

MemoryKind = Literal["allocated", "reserved", "device"]
"""What a measured figure counts: tensors, what the allocator holds for them, or all that the driver shows."""

_MEMORY_KINDS: tuple[tuple[str, MemoryKind], ...] = (
    (r"torchtitan", "reserved"),  # torchtitan/components/metrics.py: max_reserved_gib
    (r"bloom|oneflow|dlperf", "device"),  # nvidia-smi
)
"""Pattern of framework or source, and what its figures count; tensors where nothing matches."""

MemoryRank = Literal["fullest", "first", "last"]
"""Whose memory a figure is: the fullest rank's, or that of a rank of the first or the last pipeline stage."""

_MEMORY_RANKS: tuple[tuple[str, MemoryRank], ...] = (
    # MLLOG lines are those of global rank 0 (NVIDIA/mlperf-common, PyTCommunicationHandler).
    (r"training_results", "first"),
    # mem-max-allocated-bytes goes through the writer of TensorBoard, which the last rank has
    # (NVIDIA/Megatron-LM, megatron/training/global_vars.py).
    (r"functional.test", "last"),
)
"""Pattern of framework or origin, and the rank whose memory is logged; the fullest where nothing matches."""

_BINARY = r"training_results|torchtitan"
"""Pattern of origins whose figures are in 2^30 bytes, whatever the row calls them.

Torchtitan's logs and tables are in GiB. Callbacks of NVIDIA's submissions to MLPerf divide MiB by 1024 and write GB
(custom_callbacks.py); runs of the 405B that differ in data-parallel devices alone differ by what 12 bytes per parameter
of the optimizer make in 2^30 bytes.
"""

CALIBRATION_SHARE = 2
"""One in so many configurations is for calibration, the others are held out."""


class Row(msgspec.Struct, frozen=True, kw_only=True, rename={"origin": "source"}):
    """One measured configuration; None where the source does not say.

    Attributes:
        id: Name of the row; what stands before its last hyphen names the source.
        origin: Where the row was published (`source` in the file): repository, commit and file, or address.
        framework: Software, in the source's words.
        model: Name of the model.
        arch: Kind of model ("gpt", "llama", "moe", "bert", ...).
        layers: Transformer layers.
        hidden: Width.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        head_dim: Width of a head; None for that of the model by its heads.
        ffn: Width of the MLP.
        vocab: Tokens in the vocabulary.
        seq: Tokens per sequence.
        num_experts: Experts per layer.
        topk: Experts per token.
        moe_ffn: Width of an expert.
        global_batch: Sequences per step.
        micro_batch: Sequences per microbatch and replica.
        num_microbatches: Microbatches per step.
        n_gpus: Devices.
        gpus_per_node: Devices of a node.
        gpu: Device.
        intra: Links inside a node.
        inter: Links between nodes.
        tp: Tensor-parallel degree.
        pp: Pipeline degree.
        cp: Context-parallel degree.
        ep: Expert-parallel degree.
        dp: Data-parallel degree.
        vpp: Stages per group of devices.
        sequence_parallel: Whether sequence parallelism was on.
        zero: ZeRO stage, as a number or in words.
        recompute: What was recomputed, in words.
        precision: Numbers of matrix products.
        attention: Kernels of attention, in words.
        dropout: What dropout leaves masks of, as of `Stack.dropout`.
        offload: Whether what layers save is copied to host memory, whatever they recompute besides.
        recompute_modules: Modules that selective recompute runs again, as of `Stack.recompute_modules`.
        schedule: Order of microbatches, in words.
        etp: Devices that each expert is split over.
        shard: Data-parallel devices that share what ZeRO splits; None for all.
        stage_layers: Layers of every stage, in the order of the model.
        recompute_layers: Layers of every stage, the first ones, that recompute; None for all.
        dense_layers: Layers before the first with experts, of a model with fewer layers than its namesake.
        mtp_layers: Layers that predict further tokens (multi-token prediction), beside `layers`.
        numbers: Changes of the precision, as `--precision` takes them behind its name.
        lora: Adapters that were trained in place of the model, as `--lora` takes them.
        dispatch: What brings tokens to their experts, as of `Stack.dispatch`.
        hides_dispatch: Whether that runs beside the compute of another microbatch.
        overlaps_shared: Whether it runs beside the shared experts of a layer, as of `Stack.overlaps_shared`.
        hides_tp: Whether collectives of tensor parallelism run in chunks beside products, as of `Stack.hides_tp`.
        graphs: What CUDA graphs launch, as of `Stack.graphs`.
        experts: Kernels of the products of experts, as of `Stack.experts`.
        step_time_s: Measured seconds of a step.
        tokens_per_s_per_gpu: Measured throughput.
        samples_per_s: Measured throughput of all devices, in sequences.
        tflops_per_gpu: Measured TFLOP/s of a device.
        tflops_kind: What operations are counted: "model" for those of the model, without recomputed ones.
        memory_gb: Measured memory per device, in `memory_unit`.
        memory_unit: "GiB ..." for 2^30 bytes; anything else, or None, for 1e9 bytes, but for sources that write GB for
            2^30 bytes.
        predicted_by_source: What the source's own simulator says: `step_s`, `mem_gib`.
        completeness: "full", or what is missing.
        notes: Remarks of who collected the row.
        as_published: What else the source says, in its words.
    """

    id: str
    origin: str | None = None
    framework: str | None = None
    model: str | None = None
    arch: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq: int | None = None
    num_experts: int | None = None
    topk: int | None = None
    moe_ffn: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    num_microbatches: int | None = None
    n_gpus: int | None = None
    gpus_per_node: int | None = None
    gpu: str | None = None
    intra: str | None = None
    inter: str | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    vpp: int | str | None = None
    sequence_parallel: bool | None = None
    zero: int | str | None = None
    recompute: str | None = None
    precision: str | None = None
    attention: str | None = None
    dropout: str | None = None
    offload: bool | None = None
    recompute_modules: tuple[str, ...] | None = None
    schedule: str | None = None
    etp: int | None = None
    shard: int | None = None
    stage_layers: tuple[int, ...] | None = None
    recompute_layers: int | None = None
    dense_layers: int | None = None
    mtp_layers: int | None = None
    numbers: str | None = None
    lora: str | None = None
    dispatch: str | None = None
    hides_dispatch: bool | None = None
    overlaps_shared: bool | None = None
    hides_tp: bool | None = None
    graphs: str | None = None
    experts: str | None = None
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None
    tflops_per_gpu: float | None = None
    tflops_kind: str | None = None
    memory_gb: float | None = None
    memory_unit: str | None = None
    predicted_by_source: dict[str, float] | None = None
    completeness: str | None = None
    notes: str | None = None
    as_published: dict[str, Any] | None = None

    @property
    def source(self) -> str:
        """Name of the source: the id without its number."""
        return self.id.rpartition("-")[0] or self.id

    @property
    def states_degrees(self) -> bool:
        """Whether the source states the tensor-parallel and the pipeline degree."""
        return self.tp is not None and self.pp is not None

    @property
    def memory_bytes(self) -> float | None:
        """Measured bytes per device."""
        if self.memory_gb is None:
            return None
        binary = (self.memory_unit or "").startswith("GiB") or re.search(_BINARY, self.origin or "")
        return self.memory_gb * (GIB if binary else 1e9)

    @property
    def memory_kind(self) -> MemoryKind:
        """What the measured bytes count."""
        if "allocated" in (self.memory_unit or ""):
            return "allocated"
        text = f"{self.framework} {self.source}".lower()
        return next((kind for pattern, kind in _MEMORY_KINDS if re.search(pattern, text)), "allocated")

    @property
    def memory_rank(self) -> MemoryRank:
        """Whose memory was measured."""
        if "worst rank" in (self.memory_unit or ""):
            return "fullest"
        text = f"{self.framework} {self.origin}".lower()
        return next((rank for pattern, rank in _MEMORY_RANKS if re.search(pattern, text)), "fullest")

    @property
    def claimed_seconds(self) -> float | None:
        """Seconds of a step that the source's own simulator predicts."""
        stated = (self.predicted_by_source or {}).get("step_s")
        return stated or (self.as_published or {}).get("predicted_by_source_s")

    @property
    def claimed_bytes(self) -> float | None:
        """Bytes per device that the source's own simulator predicts."""
        stated = (self.predicted_by_source or {}).get("mem_gib")
        return stated * GIB if stated else None

    @property
    def calibrates(self) -> bool:
        """Whether the row is for calibration rather than held out.

        The configuration decides, by its hash: rows that measure the same thing twice are on one side, and neither ids
        nor measured values have a say.
        """
        text = msgspec.json.encode([getattr(self, name) for name in _IDENTITY])
        return int.from_bytes(hashlib.sha256(text).digest()[:8]) % CALIBRATION_SHARE == 0


def load_rows(folder: Path) -> tuple[Row, ...]:
    """Return the rows of a data folder in the order of the file.

    Raises:
        DataError: If there is no such file, or it does not hold rows; the message says where.
    """
    return tuple(_load(folder / TRAIN, list[Row]))


def _load(path: Path, kind: Any) -> Sequence[Any]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            hint="a data folder has a train.json; docs/published_steps.md has its form",
        ) from None
    try:
        found: Sequence[Any] = msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:  # also the base of ValidationError, which says where
        raise DataError(f"{path}: {error}", hint="docs/published_steps.md lists the fields of a row") from None
    return found
