"""Configurations of frameworks as plans: the degrees they state, the model, and what says nothing about either."""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.degrees import Degrees
from autopar.errors import ExportError
from autopar.frameworks.configuration import Configuration, data_parallel_degree
from autopar.frameworks.deepspeed import COMMENT
from autopar.frameworks.known import TORCHTITAN_SCHEDULES
from autopar.frameworks.megatron_import import read_arguments


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
    if framework not in READERS:
        raise ExportError(f"no configurations of {framework!r} are read", hint=f"choose {', '.join(READERS)}")
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ExportError(f"cannot read {str(path)!r}: {error.strerror}", hint="check the path") from None
    except UnicodeDecodeError:
        raise ExportError(f"{str(path)!r} is no text", hint="give the configuration, not a checkpoint") from None
    return READERS[framework](text, gpus, model)


# torchtitan.


def _torchtitan(text: str, gpus: int | None, model: str | None) -> Configuration:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ExportError(f"the configuration is no TOML: {error}", hint="give the job's .toml file") from None
    fields = _Fields(tables)
    pp = fields.whole("parallelism.pipeline_parallel_degree", 1)
    tp = fields.whole("parallelism.tensor_parallel_degree", 1)
    cp = fields.whole("parallelism.context_parallel_degree", 1)
    ep = fields.whole("parallelism.expert_parallel_degree", 1)
    replicas = fields.whole("parallelism.data_parallel_replicate_degree", 1)
    shards = fields.get("parallelism.data_parallel_shard_degree", -1)
    if shards == -1:
        shards = data_parallel_degree(gpus, {"pp": pp, "tp": tp, "cp": cp, "replicas": replicas})
    if not isinstance(shards, int) or shards < 1:
        raise ExportError(f"data_parallel_shard_degree is {shards!r}", hint="write -1 or a whole number above 0")
    dp = replicas * shards
    local = fields.whole("training.local_batch_size", 1)
    batch = fields.get("training.global_batch_size", -1)
    parts = fields.get("parallelism.module_fqns_per_model_part", None)
    layers = tuple(sum(str(name).startswith("layers.") for name in part) for part in parts) if parts else ()
    name = fields.get("parallelism.pipeline_parallel_schedule", "1F1B")
    schedule = next((ours for ours, theirs in TORCHTITAN_SCHEDULES.items() if theirs.lower() == str(name).lower()), "")
    if not schedule and pp > 1:
        raise ExportError(f"schedule {name!r} is not known", hint=f"choose {', '.join(TORCHTITAN_SCHEDULES.values())}")
    each = 2 if schedule in ("interleaved", "zb-v") else 1
    reshard = fields.get("parallelism.fsdp_reshard_after_forward", "default")
    zero = 0 if shards == 1 else 2 if reshard == "never" or (reshard == "default" and pp > 1) else 3
    recompute = fields.get("activation_checkpoint.mode", "selective")
    fields.get("activation_checkpoint.selective_ac_option", None)
    degrees = Degrees(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero=zero,
        sequence_parallel=tp > 1,
        recompute=str(recompute),
        schedule=schedule if pp > 1 else "",
        interleave=(len(layers) // pp if layers else each) if pp > 1 else 1,
        microbatch=fields.whole("parallelism.pipeline_parallel_microbatch_size", 1) if pp > 1 else local,
        global_batch=batch if isinstance(batch, int) and batch > 0 else dp * local,
        layers=layers if pp > 1 else (),
    )
    if zero and replicas > 1 and shards % ep == 0 and degrees.may_share_apart:
        degrees = replace(degrees, shard=shards // ep)
    if model is None:
        raise ExportError("a torchtitan configuration does not state the sizes of its model", hint="give --model")
    seq = fields.get("training.seq_len", None)
    dims = {"seq": seq} if isinstance(seq, int) and model.startswith(("zoo:", "hf:")) else {}
    return Configuration(degrees, model, dims, "fsdp", tuple(fields.understood()), tuple(fields.ignored()))


# DeepSpeed.


def _deepspeed(text: str, gpus: int | None, model: str | None) -> Configuration:
    try:
        tables = json.loads(text)
    except json.JSONDecodeError as error:
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
    zero = fields.get("zero_optimization.stage", 0)
    device = fields.get("zero_optimization.offload_optimizer.device", "none")
    if device not in ("none", "cpu"):
        raise ExportError(f"offload_optimizer.device is {device!r}", hint="cpu and none are predicted")
    fields.get("zero_optimization.offload_optimizer.pin_memory", None)
    offload = "optimizer" if device == "cpu" else ""
    degrees = Degrees(dp=dp, tp=tp, zero=zero, offload=offload, microbatch=microbatch, global_batch=batch)
    half = fields.get("bf16.enabled", False) is True
    precision = "mixed" if half else "megatron-fp16" if fields.get("fp16.enabled", False) is True else "fp32"
    return Configuration(degrees, model, {}, precision, tuple(fields.understood()), tuple(fields.ignored()))


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
