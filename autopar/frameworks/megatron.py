"""Megatron-LM: a plan as arguments of its training scripts, and arguments as degrees."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from autopar.cost.policy import MEGATRON_FP16, MIXED, load_policy
from autopar.errors import ExportError
from autopar.frameworks.assumptions import FULL_SHARDING, TWO_LEVELS, hides_dispatch, taken_for_granted, told
from autopar.frameworks.facts import Facts, state_lost
from autopar.frameworks.header import Remarks, header
from autopar.frameworks.known import MEGATRON_RECIPES, MEGATRON_SOURCE
from autopar.frameworks.megatron_layers import layer_arguments
from autopar.limits import MAX_LAYERS
from autopar.plan import Exported
from autopar.recompute import Hosted, Recompute
from autopar.units import parse_whole

_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
"""Strategy of Megatron's FSDP by ZeRO level."""
_SCHEDULES = ("1f1b", "interleaved", "1f1b-a2a")
_SHOWN = 60
"""Characters of a layout that a message shows."""
_FAMILIES = ("gpt", "llama", "mistral", "mixtral")
"""Families whose layers the arguments describe."""
_ROTARY_BASE = 10000
"""Default of --rotary-base."""
DIVISIBLE_BY = 128
"""Default of --make-vocab-size-divisible-by."""


def export(facts: Facts, outcome: str = "") -> Exported:
    """Return a plan as a file of arguments, one per line.

    Args:
        facts: The plan.
        outcome: What the file comes to, for its header.
    """
    lost = list(facts.lost)
    lines = [_line(name, value) for name, value in arguments_of(facts, lost).items()]
    granted = taken_for_granted(facts, "megatron")
    remarks = Remarks(lost, granted, f"Arguments are those of {MEGATRON_SOURCE}.", outcome, environment(facts))
    text = header(facts.plan, "Arguments for Megatron-LM", remarks) + "\n".join(lines) + "\n"
    return Exported("megatron.args", text.encode(), tuple(lost), granted, outcome)


def arguments_of(facts: Facts, lost: list[str], target: str = "megatron") -> dict[str, object]:
    """Return the arguments of a plan by name: True for a flag, a tuple for several values.

    Args:
        facts: The plan.
        lost: Added to: what of the plan has no argument.
        target: What the arguments are for, a column of the table of assumptions.
    """
    arguments: dict[str, object] = dict(
        [
            *_degrees(facts, lost),
            *_zero(facts, lost),
            *told(facts, target).items(),
            *_recompute(facts, lost),
            *_offload(facts, lost),
            ("--micro-batch-size", facts.microbatch),
            ("--global-batch-size", facts.plan.job.global_batch),
            *_precision(facts, lost),
            *_sizes(facts, lost),
        ]
    )
    if facts.bucket is not None:
        lost.append(facts.bucket.lost)
    if len(facts.cp_kinds) > 1 and facts.cp_kinds != TWO_LEVELS:
        lost.append(
            f"context parallelism of two levels ({' inside of '.join(facts.cp_kinds)}); {facts.cp_kind} for all"
        )
    if hides_dispatch(facts):
        if facts.pp > 1 and facts.interleave == 1:
            lost.append("Megatron-LM overlaps the all-to-all of experts in a pipeline with virtual stages only")
        if Recompute.FULL in facts.flavours:
            lost.append("Megatron-LM overlaps the all-to-all of experts without full recompute only")
    if facts.sequence_parallel is False and facts.ep > 1 and facts.tp > 1:
        lost.append("Megatron asks for --sequence-parallel when experts and tensor parallelism are combined")
    return arguments


def _line(name: str, value: object) -> str:
    """Return an argument as a line that a shell reads as it is meant."""
    if value is True:
        return name
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([name, *(shlex.quote(str(own)) for own in values)])


def environment(facts: Facts) -> list[str]:
    """Return what Megatron-LM checks in the environment (`validate_args`)."""
    if facts.zero in FULL_SHARDING:
        return ["CUDA_DEVICE_MAX_CONNECTIONS other than 1: Megatron's FSDP refuses 1"]
    if facts.tp > 1 or facts.cp > 1:
        return ["CUDA_DEVICE_MAX_CONNECTIONS=1, for tensor and context parallelism before Blackwell"]
    return []


Argument = tuple[str, object]


def _degrees(facts: Facts, lost: list[str]) -> Iterable[Argument]:
    yield "--tensor-model-parallel-size", facts.tp
    yield "--pipeline-model-parallel-size", facts.pp
    if facts.cp > 1:
        yield "--context-parallel-size", facts.cp
    if facts.ep > 1:
        yield "--expert-model-parallel-size", facts.ep
    if facts.etp and facts.ep > 1:
        yield "--expert-tensor-parallel-size", facts.etp
    if facts.sequence_parallel:
        yield "--sequence-parallel", True
    if facts.pp > 1 and facts.plan.schedule not in _SCHEDULES:
        lost.append(f"schedule {facts.plan.schedule!r}: Megatron-LM runs 1F1B, interleaved where stages take turns")
    if facts.pp == 1:
        return
    if facts.pp_inside:
        yield "--use-tp-pp-dp-mapping", True
        if facts.ep > 1:
            lost.append("pipelines inside data parallelism: Megatron-LM refuses them with experts over several devices")
    predictions = facts.predictions
    if facts.is_even and sum(predictions) == predictions[-1]:
        if facts.interleave > 1:
            yield "--num-virtual-stages-per-pipeline-rank", facts.interleave
        return
    yield "--pipeline-model-parallel-layout", layout(facts.layers, predictions)


def layout(layers: tuple[int, ...], predictions: tuple[int, ...] = ()) -> str:
    """Return Megatron's word for layers per stage: E the embedding, t a layer, m multi-token prediction, L the loss.

    >>> layout((2, 3, 1)), layout((0, 2, 2, 0), (0, 0, 0, 1))
    ('Et*2|t*3|t*1,L', 'E|t*2|t*2|m,L')
    """
    modules = predictions or (0,) * len(layers)
    parts = [
        ",".join(part for part in (f"t*{count}" if count else "", "m" * more) if part)
        for count, more in zip(layers, modules, strict=True)
    ]
    parts[0] = f"E{parts[0]}"
    parts[-1] = f"{parts[-1]},L" if parts[-1] else "L"
    return "|".join(parts)


def parse_layout(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the layers per stage that a layout states, and its modules of multi-token prediction if it has any.

    The embedding lies on the first stage and the loss on the last, which may have nothing else.

    Raises:
        ExportError: If it is none.

    >>> parse_layout("Et*2|(tt|)*3t,L"), parse_layout("E|tt|t|mL")
    (((2, 2, 2, 2, 1), ()), ((0, 2, 1, 0), (0, 0, 0, 1)))
    """
    plain = text.replace(",", "").replace(" ", "")
    while found := re.search(r"\(([^()]*)\)\*(\d+)|([EtmL])\*(\d+)", plain):
        part, number = (found[1], found[2]) if found[2] else (found[3], found[4])
        count = parse_whole(number)
        if count is None or len(part) * count > MAX_LAYERS:
            raise ExportError(f"{text[:_SHOWN]!r} has more than {MAX_LAYERS:,} layers", hint="write fewer")
        plain = plain[: found.start()] + part * count + plain[found.end() :]
    if len(plain) > 2 * MAX_LAYERS or re.search(r"[^EtmL|]", plain) or "t" not in plain:
        raise ExportError(f"{text[:_SHOWN]!r} is no pipeline layout", hint="write stages like Et*2|t*3|t*2,L")
    stages = plain.split("|")
    for letter, part, place in (("E", "embedding", 0), ("L", "loss", -1)):
        if plain.count(letter) != stages[place].count(letter) or plain.count(letter) > 1:
            raise ExportError(
                f"the {part} ({letter}) of the layout {text[:_SHOWN]!r} is not on the "
                f"{'first' if place == 0 else 'last'} stage",
                hint="write stages like Et*2|t*3|t*2,L",
            )
    layers, predictions = (tuple(stage.count(letter) for stage in stages) for letter in "tm")
    return layers, predictions if any(predictions) else ()


def _zero(facts: Facts, lost: list[str]) -> Iterable[Argument]:
    if facts.zero == 0:
        return
    yield "--use-distributed-optimizer", True
    if facts.zero in FULL_SHARDING:
        yield "--use-megatron-fsdp", True
        yield "--data-parallel-sharding-strategy", _SHARDING[facts.zero]
        yield "--ckpt-format", "fsdp_dtensor"
        yield "--no-gradient-accumulation-fusion", True
        if facts.pp > 1:
            lost.append(f"ZeRO {facts.zero} in a pipeline: check that your version of Megatron's FSDP runs in one")
    if facts.sharded < facts.dp:
        yield "--num-distributed-optimizer-instances", facts.dp // facts.sharded
        if facts.shards_apart:
            lost.append("devices that share are no neighbours here; Megatron-LM puts shards inside copies")


def _recompute(facts: Facts, lost: list[str]) -> Iterable[Argument]:
    found = facts.flavours
    if set(found) == {Recompute.NONE}:
        return
    if set(found) == {Recompute.SELECTIVE}:
        yield from _modules(facts, lost)
        return
    if set(found) == {Recompute.FULL}:
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "uniform"
        yield "--recompute-num-layers", 1
        return
    # The block method recomputes the first layers of every stage, the same number in each.
    counts = [sum(flavour is Recompute.FULL for flavour in stage) for stage in facts.recompute]
    if not any(counts):
        yield from _modules(facts, lost)
        lost.append(f"selective recompute in {found[Recompute.SELECTIVE]} of {found.total()} layers; exported for all")
        return
    yield "--recompute-granularity", "full"
    yield "--recompute-method", "block"
    yield "--recompute-num-layers", max(counts)
    by_stage = ", ".join(
        " ".join(f"{flavour}*{len(list(run))}" for flavour, run in groupby(s)) for s in facts.recompute
    )
    lost.append(
        f"recompute by layer ({by_stage} per stage); the first {max(counts)} layers of every stage are recomputed"
    )


def _modules(facts: Facts, lost: list[str]) -> Iterable[Argument]:
    """Return the modules that selective recompute runs again; unset, Megatron-LM takes the core of attention alone."""
    grouped = facts.sizes is not None and facts.sizes.experts and load_policy(facts.plan.job.precision).half == "bf16"
    modules = [own for own in facts.recompute_modules if own != "activation" and (own != "moe_act" or grouped)]
    if "activation" in facts.recompute_modules:
        lost.append("activation functions of MLPs that run again: Megatron-LM runs an MLP again whole or not at all")
    if "moe_act" in facts.recompute_modules and not grouped:
        lost.append("activation functions of experts that run again: Megatron-LM does so with --moe-grouped-gemm only")
    if facts.recompute_beside:
        kinds = ", ".join(sorted(kind.removeprefix("autopar::") for kind in facts.recompute_beside))
        lost.append(f"ops that run again and are part of no module that does in Megatron-LM: {kinds}")
    if modules:
        yield "--recompute-granularity", "selective"
        yield "--recompute-modules", tuple(modules)


def _offload(facts: Facts, lost: list[str]) -> Iterable[Argument]:
    if any(facts.offloaded):
        if facts.pp > 1:
            lost.append(
                f"activations of {sum(facts.offloaded)} layers in host memory: Megatron-LM offloads without pp only"
            )
        else:
            # It keeps the last layer on the device.
            yield "--cpu-offloading-num-layers", min(facts.offloaded[0], facts.layers[0] - 1)
            if not facts.offloads_first:
                lost.append("which layers are offloaded: Megatron-LM offloads the first ones")
    if facts.hosted:
        if not facts.zero:
            yield "--use-distributed-optimizer", True
        yield "--optimizer-cpu-offload", True
        yield "--overlap-cpu-optimizer-d2h-h2d", True
        if facts.hosted_share < 1:
            yield "--optimizer-offload-fraction", facts.hosted_share
        yield "--use-precision-aware-optimizer", True
        lost.extend(state_lost(facts, Hosted.UPDATE, "Megatron-LM"))
        if len(set(facts.hosted_shares)) > 1:
            lost.append(
                "other shares of the optimizer's state in host memory by stage: the largest is exported for all"
            )
        if len(facts.hosted) < len(facts.plan.stages):
            lost.append("which stages offload the optimizer: Megatron-LM does on all of them")


def _precision(facts: Facts, lost: list[str]) -> Iterable[Argument]:
    policy = load_policy(facts.plan.job.precision)
    if policy.half:
        yield f"--{policy.half}", True
    quantized = policy.format
    if quantized is not None and quantized.name in MEGATRON_RECIPES:
        yield from MEGATRON_RECIPES[quantized.name]
        if policy.low_weights and quantized.numbers == "fp8":
            yield "--fp8-param-gather", True
        elif policy.low_weights:
            lost.append(f"weights in {quantized.name} alone: Megatron-LM keeps them in {policy.half}, too")
    elif quantized is not None:
        lost.append(f"products of linear layers in {quantized.name}")
    if policy.half == "bf16" and policy.gradient == policy.gradient_wire == MEGATRON_FP16.gradient:
        yield "--grad-reduce-in-bf16", True
    elif policy.half == "bf16" and not policy.gradient == policy.gradient_wire == MIXED.gradient:
        lost.append("gradients that are summed and reduced in different precisions")
    if policy.moment != MIXED.moment:
        if not facts.zero:
            lost.append("moments in fewer than 32 bits: Megatron-LM stores them so with ZeRO 1 only")
        else:
            stored = "fp8" if policy.moment < MEGATRON_FP16.gradient else "bf16"
            if not facts.hosted:
                yield "--use-precision-aware-optimizer", True
            yield "--exp-avg-dtype", stored
            yield "--exp-avg-sq-dtype", stored


def _sizes(facts: Facts, lost: list[str]) -> Iterable[Argument]:
    sizes = facts.sizes
    if sizes is None:
        lost.append("sizes of the model: it is no decoder of known sizes; add --num-layers, --hidden-size and the like")
        return
    decoder = sizes.decoder
    if decoder is None and sizes.family not in _FAMILIES:
        lost.append(f"what is special about {sizes.family} layers: check activation, biases, norms and size of heads")
    yield "--num-layers", sizes.layers
    yield "--hidden-size", sizes.hidden
    yield "--num-attention-heads", sizes.heads
    if sizes.head_size not in (0, sizes.hidden // sizes.heads):
        yield "--kv-channels", sizes.head_size
    yield "--seq-length", sizes.seq
    yield "--max-position-embeddings", sizes.seq
    yield from _vocabulary(sizes.vocab, facts.tp, lost)
    yield "--ffn-hidden-size", sizes.ffn
    yield "--hidden-dropout", 0
    yield "--attention-dropout", 0
    yield "--no-create-attention-mask-in-dataloader", True  # causal attention needs none, of seq x seq bytes a sample
    if sizes.kv_heads != sizes.heads:
        yield "--group-query-attention", True
        yield "--num-query-groups", sizes.kv_heads
    if decoder is not None:
        yield from layer_arguments(decoder, lost)
    elif sizes.family != "gpt":
        yield "--swiglu", True
        yield "--normalization", "RMSNorm"
        yield "--position-embedding-type", "rope"
        if sizes.rope_theta not in (0, _ROTARY_BASE):
            yield "--rotary-base", int(sizes.rope_theta)
        yield "--disable-bias-linear", True
    if not sizes.tied:
        yield "--untie-embeddings-and-output-weights", True
    if sizes.experts:
        yield "--num-experts", sizes.experts
        yield "--moe-router-topk", sizes.top_k
        if decoder is None:
            yield "--moe-ffn-hidden-size", sizes.ffn


def _vocabulary(vocab: int, tp: int, lost: list[str]) -> Iterable[Argument]:
    """Return the vocabulary, and how far it is padded where that would be further than here."""
    yield "--vocab-size", vocab
    if vocab % (DIVISIBLE_BY * tp):
        yield "--make-vocab-size-divisible-by", 1
    if vocab % tp:
        lost.append(
            f"uneven blocks of a vocabulary of {vocab}: Megatron-LM pads it to {-(-vocab // tp) * tp}, to blocks "
            "as large as the largest here, and counts the padding as classes"
        )


LISTS = frozenset({"--recompute-modules", "--cp-comm-type", "--cuda-graph-modules"})
"""Arguments that take several values."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments as they stand in a file.

    Attributes:
        values: Values by name, with the dashes; True for a flag without one.
    """

    values: dict[str, str | bool]

    def whole(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number from 1 on.

        Raises:
            ExportError: If it is none.
        """
        value = self.values.get(name)
        if value is None:
            return default
        number = parse_whole(value) if isinstance(value, str) else None
        if not number:
            raise ExportError(f"{name} is followed by {value!r}", hint="write a whole number above 0")
        return number


def parse(text: str) -> Arguments:
    """Return the arguments of a file: of a shell script, or one per line; `#` starts a comment.

    Raises:
        ExportError: If quotes are not closed or there are no arguments.

    >>> parse("--bf16 --num-layers 4 # all of them").values
    {'--bf16': True, '--num-layers': '4'}
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ExportError(f"the arguments cannot be read: {error}", hint="close the quotes") from None
    values: dict[str, str | bool] = {}
    name = ""
    for word in words:
        # MODEL_ARGS=(--num-layers 4 ...) and MODEL_ARGS="--num-layers 4 ..." are how scripts keep them.
        for part in _unpacked(word):
            if part.startswith("--"):
                name, separator, value = part.partition("=")
                values[name] = value if separator else True
            elif name and values[name] is True:
                values[name] = part
            elif name in LISTS and re.fullmatch(r"[\w+]+", part):
                values[name] = f"{values[name]} {part}"
    if not values:
        raise ExportError("there are no arguments", hint="give a file with --tensor-model-parallel-size and the like")
    return Arguments(values)


def _unpacked(word: str) -> list[str]:
    _, separator, inside = word.partition("=")
    if separator and not word.startswith("-") and inside.lstrip("(").startswith("--"):
        return [part.strip("()") for part in shlex.split(inside)]
    return [word.strip("()")] if word.strip("()") else []
