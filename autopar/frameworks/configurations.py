"""Configurations of frameworks as plans: the degrees they state, the model, and what says nothing about either."""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.degrees import Degrees
from autopar.errors import ExportError
from autopar.frameworks.deepspeed import COMMENT
from autopar.frameworks.known import TORCHTITAN_SCHEDULES
from autopar.frameworks.megatron import Arguments, parse, parse_layout


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration of a framework as something to predict.

    Attributes:
        degrees: The plan.
        model: The model.
        dims: Sizes that differ from those of the model's name.
        precision: A key of `autopar.cost.POLICIES`; None if it does not say.
        understood: What was taken from it, a sentence each.
        ignored: What was not, each with its value.
    """

    degrees: Degrees
    model: str
    dims: Mapping[str, int]
    precision: str | None
    understood: tuple[str, ...]
    ignored: tuple[str, ...]


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


def _dp(gpus: int | None, shape: Mapping[str, int]) -> int:
    product = 1
    for degree in shape.values():
        product *= degree
    if gpus is None:
        raise ExportError("the configuration does not say on how many devices it runs", hint="give --gpus N")
    if gpus % product:
        stated = " x ".join(f"{name} {degree}" for name, degree in shape.items())
        raise ExportError(f"{gpus} devices are not divisible by {stated}", hint=f"give a multiple of {product}")
    return gpus // product


# Megatron-LM.

_WORLD = (("--nproc-per-node", "--nproc_per_node"), ("--nnodes",))
_DEGREES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
}


def _megatron(text: str, gpus: int | None, model: str | None) -> Configuration:
    arguments = _Taken(parse(text))
    shape = {name: arguments.whole(option) or 1 for name, option in _DEGREES.items()}
    if gpus is None:
        per_node, nodes = (
            next((number for option in names if (number := arguments.whole(option))), None) for names in _WORLD
        )
        gpus = per_node * (nodes or 1) if per_node else None
    dp = _dp(gpus, shape)
    layers, interleave = _stages(arguments, shape["pp"])
    microbatch = arguments.whole("--micro-batch-size") or 1
    degrees = Degrees(
        dp=dp,
        tp=shape["tp"],
        pp=shape["pp"],
        cp=shape["cp"],
        ep=arguments.whole("--expert-model-parallel-size") or 1,
        zero=_zero(arguments),
        sequence_parallel=arguments.flag("--sequence-parallel") and shape["tp"] > 1,
        recompute=_recompute(arguments),
        offload=_offload(arguments),
        interleave=interleave,
        microbatch=microbatch,
        global_batch=arguments.whole("--global-batch-size") or microbatch * dp,
        layers=layers,
    )
    source, dims = _model(arguments) if model is None else (model, {})
    precision = "mixed" if arguments.flag("--bf16") else "megatron-fp16" if arguments.flag("--fp16") else None
    return Configuration(degrees, source, dims, precision, tuple(arguments.understood()), tuple(arguments.ignored()))


class _Taken:
    """Arguments, and which of them were asked for."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._taken: dict[str, None] = {}

    def whole(self, name: str) -> int | None:
        number = self._arguments.whole(name)
        if number is not None:
            self._taken[name] = None
        return number

    def flag(self, name: str) -> bool:
        return self.text(name) is not None

    def text(self, name: str) -> str | bool | None:
        value = self._arguments.values.get(name)
        if value is not None:
            self._taken[name] = None
        return value

    def peek(self, name: str) -> str | bool | None:
        return self._arguments.values.get(name)

    def understood(self) -> list[str]:
        return [_written(name, self._arguments.values[name]) for name in self._taken]

    def ignored(self) -> list[str]:
        return [_written(name, value) for name, value in self._arguments.values.items() if name not in self._taken]


def _written(name: str, value: str | bool) -> str:
    return name if value is True else f"{name} {value}"


def _zero(arguments: _Taken) -> int:
    levels = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    distributed = arguments.flag("--use-distributed-optimizer")
    strategy = arguments.text("--data-parallel-sharding-strategy")
    if isinstance(strategy, str) and arguments.flag("--use-megatron-fsdp"):
        if strategy not in levels:
            raise ExportError(
                f"--data-parallel-sharding-strategy {strategy} is not known", hint=f"choose {', '.join(levels)}"
            )
        arguments.text("--ckpt-format")
        arguments.flag("--no-gradient-accumulation-fusion")
        return levels[strategy]
    return int(distributed)


def _recompute(arguments: _Taken) -> str:
    if layers := arguments.whole("--cpu-offloading-num-layers"):
        if layers != (arguments.whole("--num-layers") or 0) - 1:  # of L layers Megatron-LM offloads L - 1 at most
            raise ExportError(
                f"--cpu-offloading-num-layers {layers}: only all layers but the last can be predicted",
                hint="write one less than --num-layers, or leave it out",
            )
        return "offload"
    granularity = arguments.text("--recompute-granularity")
    if granularity not in (None, "full", "selective"):
        raise ExportError(f"--recompute-granularity {granularity} is not known", hint="write full or selective")
    if isinstance(granularity, str):
        if arguments.peek("--recompute-method") == "uniform":  # all layers, whatever the size of a unit
            arguments.text("--recompute-method")
            arguments.text("--recompute-num-layers")
        return granularity
    return "selective" if arguments.flag("--recompute-activations") else "none"


def _offload(arguments: _Taken) -> str:
    """Return what lies in host memory between steps."""
    fraction = arguments.peek("--optimizer-offload-fraction")
    if not arguments.flag("--optimizer-cpu-offload"):
        return ""
    arguments.flag("--use-precision-aware-optimizer")
    if fraction is not None:
        arguments.text("--optimizer-offload-fraction")
        if not isinstance(fraction, str) or _number(fraction) != 1.0:
            raise ExportError(
                f"--optimizer-offload-fraction {fraction}: all of the optimizer's state or none can be predicted",
                hint="write 1.0, or leave --optimizer-cpu-offload out",
            )
    return "optimizer"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _stages(arguments: _Taken, pp: int) -> tuple[tuple[int, ...], int]:
    """Return layers per stage (empty for an even cut) and stages per group of devices."""
    layout = arguments.text("--pipeline-model-parallel-layout")
    if isinstance(layout, str):
        layers = parse_layout(layout)
        if len(layers) % pp:
            raise ExportError(f"the layout {layout!r} has {len(layers)} stages for {pp} groups of devices")
        return layers, len(layers) // pp
    number = arguments.whole("--num-layers")
    if virtual := arguments.whole("--num-virtual-stages-per-pipeline-rank"):
        return (), virtual
    if each := arguments.whole("--num-layers-per-virtual-pipeline-stage"):
        if number is None:
            raise ExportError("--num-layers-per-virtual-pipeline-stage without --num-layers", hint="add --num-layers")
        if number % (pp * each):
            raise ExportError(f"{number} layers are not divisible by {pp} groups x {each} layers per stage")
        return (), number // (pp * each)
    first = arguments.whole("--decoder-first-pipeline-num-layers")
    last = arguments.whole("--decoder-last-pipeline-num-layers")
    if (first is None and last is None) or number is None:
        return (), 1
    between = pp - (first is not None) - (last is not None)
    rest = number - (first or 0) - (last or 0)
    if between == 0 or rest % between:
        if rest == 0 and between == 0:
            return tuple(count for count in (first, last) if count is not None), 1
        raise ExportError(f"{rest} layers are not divisible by {between} stages", hint="change the first or last stage")
    middle = (rest // between,) * between
    return (*(() if first is None else (first,)), *middle, *(() if last is None else (last,))), 1


def _model(arguments: _Taken) -> tuple[str, dict[str, int]]:
    """Return a model of the zoo with the sizes that the arguments state."""
    needed = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length")
    sizes = [arguments.whole(name) for name in needed]
    if None in sizes:
        missing = ", ".join(name for name, size in zip(needed, sizes, strict=True) if size is None)
        raise ExportError(f"the sizes of the model are not stated: {missing}", hint="give --model")
    layers, hidden, heads, seq = (int(size or 0) for size in sizes)
    common = {"num_layers": layers, "hidden": hidden, "heads": heads, "seq": seq}
    if vocab := arguments.whole("--vocab-size"):
        common["vocab"] = vocab
    arguments.whole("--max-position-embeddings")
    dense = arguments.whole("--ffn-hidden-size")
    ffn = arguments.whole("--moe-ffn-hidden-size") or dense
    experts = arguments.whole("--num-experts")
    gated = arguments.flag("--swiglu")
    bias = not arguments.flag("--disable-bias-linear")
    for name in ("--normalization", "--position-embedding-type", "--use-rotary-position-embeddings"):
        arguments.text(name)
    groups = arguments.whole("--num-query-groups") if arguments.flag("--group-query-attention") else None
    untied = arguments.flag("--untie-embeddings-and-output-weights")
    if not (gated or experts):
        if ffn not in (None, 4 * hidden):
            raise ExportError(
                f"an MLP of width {ffn} without --swiglu; the zoo's is {4 * hidden} wide",
                hint="export the model and give --model model.onnx",
            )
        return "zoo:gpt3-175b", {**common, "tied": int(not untied), "bias": int(bias)}
    common |= {"kv_heads": groups or heads, "ffn": ffn or 4 * hidden}
    if experts is None:
        return "zoo:llama3-8b", common
    return "zoo:mixtral-8x7b", {**common, "experts": experts, "top_k": arguments.whole("--moe-router-topk") or 2}


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
        shards = _dp(gpus, {"pp": pp, "tp": tp, "cp": cp, "replicas": replicas})
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
    dp = _dp(gpus, {"tp": tp})
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
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
}
"""Frameworks whose configurations are read."""
