"""Step times from the logs of training frameworks: seconds of a step, and the plan where the log states it.

Lines that are read, as public versions print them:

- Megatron-LM (`training_log` and `_print_args`): `iteration 20/ 100 | ... elapsed time per iteration (ms): 512.3 | ...
  global batch size: 32 |`, and the table `name ..... value` between "arguments" and "end of arguments".
- torchtitan (`MetricsProcessor.log`, `ParallelDims`, `Trainer`): `step: 10 loss: ... tps: 6,512 ...` (tokens per second
  and device), `Building device mesh with parallelism: pp=1, ...` or `Building 2-D device mesh with ['dp_shard', 'tp'],
  [4, 2]`, `Trainer is initialized with local batch size 1, global batch size 64, ... sequence length 8192`.
- DeepSpeed (`ThroughputTimer`, `PipelineEngine`, `DeepSpeedConfig.print`): `CurrSamplesPerSec=25.7`, `iter time (s):
  0.936`, and its configuration, `train_batch_size ... 16` and `json = {...}`.

The first line of a log holds what happens once (compilation, caches), and counts for nothing; of the others the median
counts.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from autopar.degrees import Degrees
from autopar.errors import AutoparError, DataError
from autopar.frameworks.configuration import Configuration
from autopar.frameworks.configurations import parse_configuration

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_WHOLE = r"\b[0-9]{1,12}\b"
_NUMBER = r"\b[0-9]{1,12}(?:\.[0-9]+)?"
"""Numbers as frameworks print them; longer ones are those of no run."""
_MEGATRON = re.compile(
    rf"\biteration\s+\d+\s*/\s*\d+\s*\|.*?elapsed time per iteration \(ms\):\s*({_NUMBER})(?:/{_NUMBER})?\s*\|"
    rf"(?:.*?global batch size:\s*({_WHOLE}))?"
)
_TITAN = re.compile(r"\bstep:\s*\d+\s.*?\bloss:.*?\b(?:tps|wps):\s*([0-9][0-9,]{0,15})\b")
_DEEPSPEED = re.compile(rf"\bCurrSamplesPerSec=({_NUMBER}(?:e[+-]?[0-9]{{1,2}})?)")
_PIPELINE = re.compile(rf"\bsteps:\s*\d+\s.*?\biter time \(s\):\s*({_NUMBER})")
_TABLE = re.compile(r"^\s*(?:\[[^\]]*\]:?\s*)?([A-Za-z_]\w*) \.{2,} (.*?)\s*$")
_CONFIG = re.compile(r":print\]\s+(\w+) (?:\.* )?\s*(\S.*?)\s*$")
_MESH = re.compile(r"Building device mesh with parallelism: (.*)")
_OLD_MESH = re.compile(r"Building \d+-D device mesh with \[([\w', ]*)\], \[([0-9, ]*)\]")
_TRAINER = re.compile(
    rf"Trainer is initialized with local batch size ({_WHOLE}), global batch size ({_WHOLE}),"
    rf".*?sequence length ({_WHOLE})"
)
_RECOMPUTE = re.compile(r"Applied (\w+) activation checkpointing", re.IGNORECASE)
_POLICIES = {"FullAC": "full", "SelectiveAC": "selective"}
"""Names of torchtitan 0.3's classes, by those of its modes before."""
_DERIVED = frozenset({"encoder_num_layers", "encoder_seq_length", "consumed_train_samples", "consumed_valid_samples"})
"""What Megatron-LM sets itself from other arguments."""
_NEGATED = {"add_bias_linear": "--disable-bias-linear"}
"""Arguments that are off where the option is given."""
_OPTIONS = {"fp8": "--fp8-format", "fp4": "--fp4-format", "padded_vocab_size": "--vocab-size"}
"""Options whose names differ from those of the table."""
_ITEM = re.compile(r"[\w+.]+")
_TYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_TELL = 'give --degrees "dp=8 tp=2 microbatch=1", or a CSV with a column log beside those of the degrees'


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """What a log says.

    Attributes:
        framework: Who wrote it: "megatron", "torchtitan" or "deepspeed".
        seconds: Median of a step.
        low: A tenth of the lines state less.
        high: A tenth of the lines state more.
        num_lines: Lines that the median is of.
        degrees: The plan that ran.
        model: The model, where the log states its sizes; else what was given.
        dims: Sizes of the model.
        precision: What it computed in; None if the log does not say.
        assumed: What is taken otherwise than the framework would, a sentence each.
    """

    framework: str
    seconds: float
    low: float
    high: float
    num_lines: int
    degrees: Degrees
    model: str
    dims: Mapping[str, int]
    precision: str | None
    assumed: tuple[str, ...]


@dataclass(slots=True)
class _Stated:
    """What lines of a log state besides step times."""

    megatron: dict[str, str] = field(default_factory=dict)
    deepspeed: dict[str, str] = field(default_factory=dict)
    document: dict[str, Any] | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    local_batch: int = 0
    global_batch: int = 0
    sequence: int = 0
    recompute: str = "none"


def read_log(path: Path, *, degrees: Degrees | None = None, model: str | None = None) -> TrainingLog:
    """Return what the log of a training run says.

    Args:
        path: The log.
        degrees: The plan; None if the log states it.
        model: The model; None if the log states its sizes.

    Raises:
        DataError: If it cannot be read, has no step times after its first, or says too little.
    """
    try:
        text = _COLOURS.sub("", path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}", hint="check the path") from None
    lines = text.splitlines()
    stated = _stated(text, lines)
    framework, seconds = _step_times(path, lines, stated, degrees)
    found: Configuration | None = None
    if degrees is None:
        found = _configuration(path, framework, stated, model)
        degrees = found.degrees
    if not (model or (found and found.model)):
        raise DataError(f"{path} does not state its model", hint="give --model")
    kept = sorted(seconds[1:])
    tenth = len(kept) // 10
    return TrainingLog(
        framework,
        median(kept),
        kept[tenth],
        kept[-1 - tenth],
        len(kept),
        degrees,
        (found.model if found else model) or "",
        found.dims if found else {},
        found.precision if found else None,
        found.assumed if found else (),
    )


def _step_times(
    path: Path, lines: Sequence[str], stated: _Stated, degrees: Degrees | None
) -> tuple[str, Sequence[float]]:
    """Return the framework and seconds of steps by line; of a batch that grows, those with the last size."""
    iterations = [match for line in lines if (match := _MEGATRON.search(line))]
    rates = [float(match[1].replace(",", "")) for line in lines if (match := _TITAN.search(line))]
    steps = [float(match[1]) for line in lines if (match := _PIPELINE.search(line))]
    samples = [float(match[1]) for line in lines if (match := _DEEPSPEED.search(line))]
    if iterations:
        last = iterations[-1][2]
        framework, found = "megatron", [float(each[1]) / 1000 for each in iterations if each[2] == last]
        stated.global_batch = int(last or 0)
    elif rates:
        framework, found = "torchtitan", _per_device(path, rates, stated, degrees)
    elif steps:
        framework, found = "deepspeed", steps
    elif samples:
        batch = degrees.global_batch if degrees else _whole(stated.deepspeed.get("train_batch_size"))
        if not batch:
            raise DataError(f"{path} states samples per second, and not how many a step has", hint=_TELL)
        framework, found = "deepspeed", [batch / rate for rate in samples if rate > 0]
    else:
        raise DataError(
            f"{path} has no step times",
            hint="logs of Megatron-LM, torchtitan and DeepSpeed are read, or a CSV: see docs/profile.md",
        )
    found = [seconds for seconds in found if seconds > 0]
    if len(found) < 2:
        raise DataError(
            f"{path} states {len(found)} step time{'s' * (len(found) != 1)}, and the first does not count",
            hint="log more often, or let it run longer",
        )
    return framework, found


def _per_device(path: Path, rates: Sequence[float], stated: _Stated, degrees: Degrees | None) -> list[float]:
    """Return seconds of steps from tokens per second and device."""
    gpus = degrees.gpus if degrees else _devices(stated.mesh)
    batch = degrees.global_batch if degrees else stated.global_batch
    if not (gpus and batch and stated.sequence):
        raise DataError(
            f"{path} states tokens per second, and not how many a step has",
            hint="keep the lines 'Building device mesh' and 'Trainer is initialized' of the log",
        )
    return [batch * stated.sequence / (rate * gpus) for rate in rates if rate > 0]


def _devices(mesh: Mapping[str, int]) -> int:
    """Return the devices of a mesh of torchtitan, whose expert axes lie in the others; 0 if nothing is known of it."""
    product = int(bool(mesh))
    for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        product *= mesh.get(name, 1)
    return product


def _stated(text: str, lines: Sequence[str]) -> _Stated:
    found = _Stated()
    inside = False
    for line in lines:
        if "end of" in line and "arguments" in line and "----" in line:
            inside = False
        elif "----" in line and " arguments " in line:
            inside = True
        elif inside and (match := _TABLE.match(line)):
            found.megatron[match[1]] = match[2]
        elif match := _CONFIG.search(line):
            found.deepspeed[match[1]] = match[2]
        elif match := _MESH.search(line):
            found.mesh = {name: int(size) for name, size in re.findall(rf"(\w+)=({_WHOLE})", match[1])}
        elif match := _OLD_MESH.search(line):
            names, sizes = re.findall(r"\w+", match[1]), [*map(int, re.findall(_WHOLE, match[2]))]
            found.mesh = dict(zip(names, sizes, strict=True)) if len(names) == len(sizes) else {}
        elif match := _TRAINER.search(line):
            found.local_batch, found.global_batch, found.sequence = map(int, match.groups())
        elif match := _RECOMPUTE.search(line):
            found.recompute = _POLICIES.get(match[1], match[1].lower())
    start = text.find(":print]   json = {")
    if start >= 0:
        try:
            document, _ = json.JSONDecoder().raw_decode(text, text.index("{", start))
            found.document = _with_whole_numbers(document)
        except (ValueError, RecursionError):
            found.document = None  # cut off, or lines of other ranks between its own: the table above says the batch
    return found


def _with_whole_numbers(value: Any) -> Any:
    """Return a document of DeepSpeed, which prints large whole numbers like 6.553600e+04, with whole numbers."""
    if isinstance(value, dict):
        return {name: _with_whole_numbers(own) for name, own in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(own) for own in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole(text: str | None) -> int:
    return int(text) if text is not None and re.fullmatch(_WHOLE, text) else 0


def _configuration(path: Path, framework: str, stated: _Stated, model: str | None) -> Configuration:
    """Return what a log states of the plan, read as the framework's own configuration is."""
    try:
        if stated.megatron:
            found = parse_configuration(
                "\n".join(_arguments(stated.megatron)), "megatron",
                gpus=_whole(stated.megatron.get("world_size")) or None, model=model,
            )  # fmt: skip
            if stated.global_batch:
                found = replace(found, degrees=replace(found.degrees, global_batch=stated.global_batch))
            shares = (stated.document or {}).get("zero_optimization")
            zero = shares.get("stage") if isinstance(shares, dict) else None
            return replace(found, degrees=replace(found.degrees, zero=zero)) if zero in (1, 2, 3) else found
        if framework == "torchtitan":
            return parse_configuration(_titan_toml(stated), framework, model=model)
        if framework == "deepspeed" and (stated.document is not None or stated.deepspeed):
            document = dict(stated.document or {})
            document |= {name: size for name in _BATCHES if (size := _whole(stated.deepspeed.get(name)))}
            gpus = _whole(stated.deepspeed.get("world_size"))
            return parse_configuration(json.dumps(document), framework, gpus=gpus or None, model=model)
    except AutoparError as error:
        raise DataError(f"{path}: {error.args[0]}", hint=f"{error.hint}; or {_TELL}") from None
    raise DataError(f"{path} does not state the plan", hint=_TELL)


def _arguments(table: Mapping[str, str]) -> Iterator[str]:
    """Yield the options that the table of arguments comes from, one per line."""
    for name, written in table.items():
        value = _TYPES.get(written, written)
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        if name in _NEGATED:
            if value == "False":
                yield _NEGATED[name]
        elif name in _DERIVED or value in ("None", "False", "[]", ""):
            continue
        elif value == "True":
            yield option
        elif value == "0" and not name.endswith("dropout"):
            continue  # a number that is off
        elif name == "attention_backend":
            yield f"{option} {value.rpartition('.')[2]}"
        elif value.startswith("["):
            yield " ".join([option, *_ITEM.findall(value)])
        else:
            yield f"{option} {shlex.quote(value)}"


def _titan_toml(stated: _Stated) -> str:
    """Return a configuration of torchtitan that a log comes from."""
    mesh = stated.mesh
    fields = {
        "pipeline_parallel_degree": mesh.get("pp", 1),
        "tensor_parallel_degree": mesh.get("tp", 1),
        "context_parallel_degree": mesh.get("cp", 1),
        "expert_parallel_degree": mesh.get("ep", 1),
        "data_parallel_replicate_degree": mesh.get("dp_replicate", 1),
        "data_parallel_shard_degree": mesh.get("dp_shard", 1),
    }
    training = {
        "local_batch_size": stated.local_batch,
        "global_batch_size": stated.global_batch,
        "seq_len": stated.sequence,
    }
    return "\n".join(
        [
            "[parallelism]",
            *(f"{name} = {size}" for name, size in fields.items()),
            "[training]",
            *(f"{name} = {size}" for name, size in training.items()),
            "[activation_checkpoint]",
            f'mode = "{stated.recompute}"',
            'selective_ac_option = "op"',
        ]
    )
