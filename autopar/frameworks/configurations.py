"""Configurations of frameworks as plans: the degrees they state, the model, and what says nothing about either."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

from autopar import models
from autopar.context_parallelism import CONTEXT_KINDS, ContextKind
from autopar.degrees import Degrees
from autopar.errors import ExportError
from autopar.frameworks.configuration import Configuration, data_parallel_degree
from autopar.frameworks.deepspeed import COMMENT
from autopar.frameworks.facts import config_sizes, sizes_of
from autopar.frameworks.known import ROTATE_METHODS, TORCHTITAN_SCHEDULES
from autopar.frameworks.megatron_import import read_arguments
from autopar.frameworks.python_file import is_python, read_fields
from autopar.huggingface import read_config
from autopar.reading import UnreadableError, parse_json, parse_toml
from autopar.units import parse_whole
from autopar.workload import HUGGING_FACE, ZOO


def read_configuration(
    path: str | Path, framework: str, *, gpus: int | None = None, model: str | None = None
) -> Configuration:
    """Return what a configuration states.

    Args:
        path: The file.
        framework: "megatron", "torchtitan" or "deepspeed".
        gpus: Number of devices; None if the file says.
        model: The model; None if the file states its sizes.

    Raises:
        ExportError: If there is no such framework, or the file cannot be read, or says too little.
        JobError: If its degrees contradict each other.
    """
    _check_framework(framework)
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ExportError(f"cannot read {str(path)!r}: {error.strerror}", hint="check the path") from None
    except UnicodeDecodeError:
        raise ExportError(f"{str(path)!r} is no text", hint="give the configuration, not a checkpoint") from None
    return parse_configuration(text, framework, gpus=gpus, model=model)


def parse_configuration(
    text: str, framework: str, *, gpus: int | None = None, model: str | None = None
) -> Configuration:
    """Return what the text of a configuration states; arguments and errors as of `read_configuration`."""
    _check_framework(framework)
    return READERS[framework](text, gpus, model)


def _check_framework(framework: str) -> None:
    if framework not in READERS:
        raise ExportError(f"no configurations of {framework!r} are read", hint=f"choose {', '.join(READERS)}")


# torchtitan; the defaults are those of its configuration classes (`TORCHTITAN_SOURCE`).

_LOCAL_BATCH = 8
"""Default of training.local_batch_size."""
_SEQUENCE = 2048
"""Default of training.seq_len."""
_SELECTIVE = "2"
"""Default of activation_checkpoint.selective_ac_option, up to torchtitan 0.2."""
_POLICIES = {"FullAC": "full", "SelectiveAC": "selective", "None": "none"}
"""What classes of activation checkpointing make layers recompute, from torchtitan 0.3 on."""


def _torchtitan(text: str, gpus: int | None, model: str | None) -> Configuration:
    python = is_python(text)
    fields = _Fields(read_fields(text) if python else _toml(text))
    pp = fields.whole("parallelism.pipeline_parallel_degree", 1)
    tp = fields.whole("parallelism.tensor_parallel_degree", 1)
    cp = fields.whole("parallelism.context_parallel_degree", 1)
    ep = fields.whole("parallelism.expert_parallel_degree", 1)
    replicas = fields.whole("parallelism.data_parallel_replicate_degree", 1)
    shards = fields.whole_or_auto("parallelism.data_parallel_shard_degree")
    if shards is None:
        shards = data_parallel_degree(gpus, {"pp": pp, "tp": tp, "cp": cp, "replicas": replicas})
    dp = replicas * shards
    local = fields.whole("training.local_batch_size", _LOCAL_BATCH)
    batch = fields.whole_or_auto("training.global_batch_size")
    parts = fields.lists("parallelism.module_fqns_per_model_part")
    _check_parts(parts)
    layers = tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)
    name = fields.text("parallelism.pipeline_parallel_schedule", "1F1B")
    schedule = next((ours for ours, theirs in TORCHTITAN_SCHEDULES.items() if theirs.lower() == name.lower()), "")
    if not schedule and pp > 1:
        raise ExportError(f"schedule {name!r} is not known", hint=f"choose {', '.join(TORCHTITAN_SCHEDULES.values())}")
    each = 2 if schedule in ("interleaved", "zb-v", "dualpipe-v") else 1
    reshard = fields.text("parallelism.fsdp_reshard_after_forward", "default")
    # Devices that split a sequence share parameters with those that split the batch.
    zero = 0 if shards * cp == 1 else 2 if reshard == "never" or (reshard == "default" and pp > 1) else 3
    recompute, every = _titan_recompute(fields, python=python)
    assumed = _titan_stages(pp, parts)
    degrees = Degrees(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        cp_kind=_titan_context(fields) if cp > 1 else "",
        ep=ep,
        etp=1 if ep > 1 and tp > 1 else 0,  # each device has whole experts
        zero=zero,
        sequence_parallel=tp > 1 and fields.get("parallelism.enable_sequence_parallel", True) is True,
        recompute=recompute,
        recompute_every=every,
        schedule=schedule if pp > 1 else "",
        interleave=(len(layers) // pp if layers else each) if pp > 1 else 1,
        microbatch=fields.whole("parallelism.pipeline_parallel_microbatch_size", 1) if pp > 1 else local,
        global_batch=batch or dp * local,
        layers=layers if pp > 1 else (),
    )
    if (shards * cp * tp) % ep:
        raise ExportError(
            f"expert_parallel_degree {ep} does not divide data_parallel_shard_degree {shards} x cp {cp} x tp {tp}; "
            "torchtitan refuses that",
            hint=f"expert_parallel_degree = {gcd(ep, shards * cp * tp)}",
        )
    if zero and replicas > 1 and shards % degrees.expert_axis == 0 and degrees.may_share_apart:
        degrees = replace(degrees, shard=shards // degrees.expert_axis)
    if model is None:
        raise ExportError("a torchtitan configuration does not state the sizes of its model", hint="give --model")
    if kv_heads := _key_value_heads(model):
        _check_key_value_heads(kv_heads, tp)
    seq = fields.whole("training.seq_len", _SEQUENCE)
    dims = {"seq": seq} if model.startswith(("zoo:", "hf:")) else {}
    half = fields.text("training.mixed_precision_param", "bfloat16") == "bfloat16"
    software = tuple(_titan_software(fields, tp, python=python).items())
    return Configuration(
        degrees, model, dims, "fsdp" if half else "fp32", tuple(fields.understood()), tuple(fields.ignored()),
        tuple(assumed), software=software,
    )  # fmt: skip


def _toml(text: str) -> Mapping[str, Any]:
    try:
        return parse_toml(text, foreign=True)
    except UnreadableError as error:
        raise ExportError(
            f"the configuration is no TOML: {error}", hint="give the job's .toml file, or the Python of an export"
        ) from None


def _titan_software(fields: "_Fields", tp: int, *, python: bool) -> dict[str, object]:
    """Return the fields of the software stack that are stated."""
    found: dict[str, object] = {}
    compiles = fields.get("compile.enable", False) is True
    section = "compile" if python else "parallelism"
    hides_tp = fields.get(f"{section}.enable_async_tensor_parallel", False) is True
    if compiles and hides_tp and tp > 1:
        found["hides_tp"] = True
    if _titan_recompute(fields, python=python)[0] == "selective":
        found["selective"] = "alternate"
    if python:
        found["fusion"] = "chains" if compiles else "none"
        found["graphs"] = "none" if fields.get("training.disable_cuda_graphs", False) is True else "full"
    return found


def _titan_recompute(fields: "_Fields", *, python: bool) -> tuple[str, int]:
    """Return what layers recompute, and of how many layers the last one does."""
    if python:
        policy = str(fields.get("activation_checkpoint", "SelectiveAC"))
        if policy not in _POLICIES:
            raise ExportError(f"activation_checkpoint is {policy!r}", hint=f"{', '.join(_POLICIES)} are predicted")
        return _POLICIES[policy], 1
    mode = fields.text("activation_checkpoint.mode", "selective")
    option = str(fields.get("activation_checkpoint.selective_ac_option", _SELECTIVE))
    if mode != "selective" or option == "op":
        return mode, 1
    every = parse_whole(option)
    if not every:
        raise ExportError(f"selective_ac_option is {option!r}", hint='write "op", or of how many layers one recomputes')
    return "full", every


def _titan_context(fields: "_Fields") -> ContextKind:
    """Return how attention gets at positions of other devices."""
    name = fields.text("parallelism.context_parallel_rotate_method", "allgather")
    kind = next((kind for kind in CONTEXT_KINDS if ROTATE_METHODS.get(kind) == name), None)
    if kind is None:
        raise ExportError(
            f"context_parallel_rotate_method is {name!r}", hint=f"choose {', '.join(ROTATE_METHODS.values())}"
        )
    return kind


def _titan_stages(pp: int, parts: object) -> list[str]:
    """Return that stages are cut otherwise than torchtitan cuts them if nobody says."""
    if pp == 1 or parts:
        return []
    return ["layers are cut evenly; torchtitan leaves one fewer in the first and in the last stage"]


def _check_parts(parts: Sequence[Sequence[object]]) -> None:
    """Refuse stages that leave layers out or have them twice.

    Raises:
        ExportError: If they do: torchtitan builds what is listed, whatever the model has.
    """
    names = [str(name) for part in parts for name in part if str(name).startswith("layers.")]
    wanted = [f"layers.{index}" for index in range(len(names))]
    if sorted(names) != sorted(wanted):
        twice = next((name for name in names if names.count(name) > 1), "")
        missing = next((name for name in wanted if name not in names), "")
        raise ExportError(
            f"module_fqns_per_model_part has {f'{twice} twice' if twice else f'no {missing}'}: torchtitan builds the "
            "model without a word",
            hint="list every layer in one stage",
        )


def _key_value_heads(model: str) -> int:
    """Return the key-value heads of a model of the zoo or a configuration that tells them, else 0."""
    sizes = None
    if model.startswith(ZOO):
        entry = models.spec(model.removeprefix(ZOO))
        sizes = sizes_of(entry.family, entry.config)
    elif model.startswith(HUGGING_FACE):
        sizes = config_sizes(read_config(model.removeprefix(HUGGING_FACE)), {})
    return 0 if sizes is None else sizes.kv_heads


def _check_key_value_heads(kv_heads: int, tp: int) -> None:
    if kv_heads % tp:
        raise ExportError(
            f"{kv_heads} key-value heads do not divide over tensor_parallel_degree {tp}; torchtitan refuses that",
            hint=f"choose a degree that divides {kv_heads}",
        )


# DeepSpeed.


def _deepspeed(text: str, gpus: int | None, model: str | None) -> Configuration:
    try:
        tables = parse_json(text, foreign=True)
    except UnreadableError as error:
        raise ExportError(f"the configuration is no JSON: {error}", hint="give the ds_config.json") from None
    if not isinstance(tables, dict):
        raise ExportError("the configuration is no JSON object", hint="give the ds_config.json")
    tables.pop(COMMENT, None)
    fields = _Fields(tables)
    if model is None:
        raise ExportError("a DeepSpeed configuration does not state the model", hint="give --model")
    tp = fields.whole("tensor_parallel.autotp_size", 1)
    dp = data_parallel_degree(gpus, {"tp": tp})
    microbatch = fields.whole("train_micro_batch_size_per_gpu", 0)
    steps = fields.whole("gradient_accumulation_steps", 0)
    batch = fields.whole("train_batch_size", 0)
    if sum(map(bool, (microbatch, steps, batch))) == 1 and not microbatch and not batch:
        raise ExportError("the configuration states no batch", hint="add train_batch_size")
    batch = batch or microbatch * dp * max(1, steps)
    microbatch = microbatch or batch // (dp * max(1, steps))
    if not batch or not microbatch:
        raise ExportError('the configuration states no batch, or "auto"', hint="write numbers for the batch sizes")
    zero = fields.whole("zero_optimization.stage", 0)
    device = fields.get("zero_optimization.offload_optimizer.device", "none")
    if device not in ("none", "cpu"):
        raise ExportError(f"offload_optimizer.device is {device!r}", hint="cpu and none are predicted")
    fields.get("zero_optimization.offload_optimizer.pin_memory", None)
    ratio = fields.get("zero_optimization.offload_optimizer.ratio", 1.0) if zero == 3 else 1.0
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ExportError(f"offload_optimizer.ratio is {ratio!r}", hint="write a share above 0 and up to 1")
    there = fields.get("zero_optimization.offload_param.device", "none") if zero == 3 else "none"
    fields.get("zero_optimization.offload_param.pin_memory", None)
    if there not in ("none", "cpu") or (there == "cpu" and (device != "cpu" or ratio < 1)):
        raise ExportError(
            f"offload_param.device is {there!r}, offload_optimizer.device {device!r} of {ratio}",
            hint="parameters are predicted in host memory beside all of the optimizer: cpu for both, without a ratio",
        )
    what = "parameters" if there == "cpu" else "gradients"
    offload = "" if device == "none" else what if ratio == 1 else f"{what}={ratio}"
    degrees = Degrees(dp=dp, tp=tp, zero=zero, offload=offload, microbatch=microbatch, global_batch=batch)
    assumed = _deepspeed_overlap(fields, degrees)
    half = fields.get("bf16.enabled", False) is True
    for name in ("zero_optimization.reduce_bucket_size", "data_types.grad_accum_dtype", "communication_data_type"):
        fields.get(name, None)
    precision = "mixed" if half else "megatron-fp16" if fields.get("fp16.enabled", False) is True else "fp32"
    return Configuration(
        degrees, model, {}, precision, tuple(fields.understood()), tuple(fields.ignored()), tuple(assumed)
    )


def _deepspeed_overlap(fields: "_Fields", degrees: Degrees) -> list[str]:
    """Return what the simulator takes for granted of communication and DeepSpeed does only if it is told to."""
    overlaps = fields.get("zero_optimization.overlap_comm", degrees.zero == 3)  # the default of ZeRO 3 is true
    if degrees.dp == 1 or (degrees.zero and overlaps is True):
        return []
    return ["gradients are reduced while the backward runs; DeepSpeed does that with ZeRO and overlap_comm"]


class _Fields:
    """Fields of nested tables by dotted name, and which of them were asked for."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        self._values = dict(_flat(tables, ""))
        self._taken: dict[str, None] = {}

    def get(self, name: str, default: Any) -> Any:
        if name in self._values:
            self._taken[name] = None
        return self._values.get(name, default)

    def whole(self, name: str, default: int) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < min(1, default):
            raise ExportError(f"{name} is {value!r}", hint="write a whole number above 0")
        return value

    def whole_or_auto(self, name: str) -> int | None:
        """Return a whole number; None for -1, or if nothing is said."""
        return None if self.get(name, -1) == -1 else self.whole(name, 1)

    def text(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise ExportError(f"{name} is {value!r}", hint=f"write a text, such as {default!r}")
        return value

    def lists(self, name: str) -> list[list[Any]]:
        """Return lists in a list; none if nothing is said."""
        value = self.get(name, None) or []
        if not (isinstance(value, list) and all(isinstance(part, list) for part in value)):
            raise ExportError(f"{name} is {value!r}", hint="write a list of names for each stage, in a list")
        return value

    def understood(self) -> list[str]:
        return [f"{name} = {self._values[name]}" for name in self._taken]

    def ignored(self) -> list[str]:
        return [f"{name} = {value}" for name, value in self._values.items() if name not in self._taken]


def _flat(tables: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tables.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return found


READERS: Mapping[str, Callable[[str, int | None, str | None], Configuration]] = {
    "megatron": read_arguments,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
}
"""Frameworks whose configurations are read."""
