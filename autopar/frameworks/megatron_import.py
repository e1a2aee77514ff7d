"""Megatron-LM's arguments as degrees: what a training script would run, its own defaults included.

Defaults and refusals are those of `megatron/training/arguments.py` (`MEGATRON_SOURCE`): what Megatron-LM refuses is
refused here, and a default of its own is never replaced by one of ours without a word in `Configuration.assumed`.
"""

from math import gcd
from typing import Literal

from autopar.context_parallelism import ContextKind
from autopar.cost import load_policy
from autopar.cost.overlap import full_bucket
from autopar.degrees import Degrees
from autopar.errors import ExportError
from autopar.frameworks.abilities import ABILITIES
from autopar.frameworks.assumptions import CP_COMM_TYPES
from autopar.frameworks.configuration import Configuration, data_parallel_degree
from autopar.frameworks.known import MEGATRON_RECIPES
from autopar.frameworks.megatron import Arguments, parse, parse_layout
from autopar.frameworks.megatron_model import read_model, vocabulary_multiple
from autopar.sharding import Axis
from autopar.units import parse_whole

_WORLD = (("--nproc-per-node", "--nproc_per_node"), ("--nnodes",))
_DEGREES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
}
_TWO_LEVELS = "a2a+p2p"
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO level by `--data-parallel-sharding-strategy`; the first is the default."""


def read_arguments(text: str, gpus: int | None, model: str | None) -> Configuration:
    """Return what arguments of Megatron-LM state.

    Args:
        text: A file of arguments, or a shell script with them.
        gpus: Number of devices; None if the text says.
        model: The model; None if the arguments state its sizes.

    Raises:
        ExportError: If the text has no arguments, Megatron-LM would refuse them, or no plan of ours is like them.
        JobError: If its degrees contradict each other.
    """
    arguments = Taken(parse(text))
    assumed: list[str] = []
    shape = {name: arguments.whole(option) or 1 for name, option in _DEGREES.items()}
    if gpus is None:
        per_node, nodes = (
            next((number for option in names if (number := arguments.whole(option))), None) for names in _WORLD
        )
        gpus = per_node * (nodes or 1) if per_node else None
    dp = data_parallel_degree(gpus, shape)
    tp, pp, cp = shape["tp"], shape["pp"], shape["cp"]
    ep, etp = _experts(arguments, dp, cp, tp)
    layers, predictions, interleave = _stages(arguments, pp)
    recompute, first_layers = _recompute(arguments, layers, pp * interleave)
    zero = _zero(arguments)
    shard = _sharing(arguments, zero, dp // max(1, ep // _inside(cp, tp, etp)))
    offload = _offload(arguments)
    microbatch = arguments.whole("--micro-batch-size")
    if microbatch is None:
        raise ExportError("there is no --micro-batch-size; Megatron-LM asks for one", hint="add --micro-batch-size 1")
    _check_sequence(arguments, cp)
    degrees = Degrees(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        cp_kind=_context(arguments, cp),
        ep=ep,
        etp=etp,
        zero=zero,
        shard=shard,
        sequence_parallel=arguments.flag("--sequence-parallel") and tp > 1,
        recompute=recompute,
        offload=offload,
        schedule=_schedule(arguments, pp, ep, interleave),
        interleave=interleave,
        microbatch=microbatch,
        global_batch=arguments.whole("--global-batch-size") or microbatch * dp,
        layers=layers,
        predictions=predictions,
        pp_inside=arguments.flag("--use-tp-pp-dp-mapping"),
    )
    source, dims = (
        (model, _predictions(arguments))
        if model is not None
        else read_model(arguments, vocabulary_multiple(arguments, tp), assumed)
    )
    precision = _stated_precision(arguments)
    _communication(arguments, degrees, precision, assumed)
    software = tuple(_software(arguments, degrees).items())
    return Configuration(
        degrees,
        source,
        dims,
        precision,
        tuple(arguments.understood()),
        tuple(arguments.ignored()),
        tuple(assumed),
        first_layers,
        software,
    )


def _predictions(arguments: "Taken") -> dict[str, int]:
    """Return the further tokens that a given model is trained to predict, by the name of that size; none by default."""
    depth = arguments.whole("--mtp-num-layers")
    return {} if depth is None else {"mtp": depth}


def _stated_precision(arguments: "Taken") -> str:
    """Return the precision of arguments.

    Raises:
        ExportError: If they name an unknown recipe of scaling.
    """
    half = "mixed" if arguments.flag("--bf16") else "megatron-fp16" if arguments.flag("--fp16") else "fp32"
    low, recipe, format4 = (arguments.text(name) for name in ("--fp8-format", "--fp8-recipe", "--fp4-format"))
    arguments.text("--fp4-recipe")
    words = [half]
    if format4 is not None:
        words = ["nvfp4"]
    elif low is not None:
        wanted = str(recipe or "delayed")
        known = {dict(own).get("--fp8-recipe"): name for name, own in MEGATRON_RECIPES.items()}
        if wanted not in known:
            raise ExportError(f"--fp8-recipe is {wanted!r}", hint=f"{', '.join(filter(None, known))} are predicted")
        words = [known[wanted]]
    if arguments.flag("--fp8-param-gather") and low is not None:
        words.append("weights=low")
    if arguments.flag("--grad-reduce-in-bf16") and half == "mixed":
        words += ["gradients=16", "reduce=16"]
    bits = {"fp32": "32", "fp16": "16", "bf16": "16", "fp8": "8", "uint8": "8"}
    moments = {arguments.text(name) or "fp32" for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype")}
    if moments != {"fp32"}:
        widths = {bits.get(str(name), "") for name in moments}
        if len(widths) > 1 or "" in widths:
            raise ExportError("--exp-avg-dtype and --exp-avg-sq-dtype differ", hint="predict with one width of both")
        words.append(f"moments={widths.pop()}")
    return ",".join(words)


class Taken:
    """Arguments, and which of them were asked for."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._taken: dict[str, None] = {}

    def whole(self, name: str) -> int | None:
        """Return a whole number from 1 on, None if it is not there."""
        number = self._arguments.whole(name)
        if number is not None:
            self._taken[name] = None
        return number

    def flag(self, name: str) -> bool:
        """Return whether an argument is there."""
        return self.text(name) is not None

    def text(self, name: str) -> str | bool | None:
        """Return what follows an argument, True if nothing does, None if it is not there."""
        value = self.peek(name)
        if value is not None:
            self._taken[name] = None
        return value

    def peek(self, name: str) -> str | bool | None:
        """Return what follows an argument that stays ignored."""
        return self._arguments.values.get(name)

    def understood(self) -> list[str]:
        """Return the arguments that were asked for."""
        return [_written(name, self._arguments.values[name]) for name in self._taken]

    def ignored(self) -> list[str]:
        """Return the arguments that were not."""
        return [_written(name, value) for name, value in self._arguments.values.items() if name not in self._taken]


def _written(name: str, value: str | bool) -> str:
    return name if value is True else f"{name} {value}"


def _inside(cp: int, tp: int, etp: int) -> int:
    """Return the devices of an expert group with different experts that have the same samples."""
    return cp * (tp if etp == 1 else 1)


def _experts(arguments: Taken, dp: int, cp: int, tp: int) -> tuple[int, int]:
    """Return the expert-parallel degree, and the devices that each expert is split over (0 for the tensor-parallel).

    Megatron-LM deals experts out over groups of ep x etp neighbours, etp the tensor-parallel degree unless stated:
    tensor-parallel devices first, then context-parallel, then data-parallel ones.
    """
    ep = arguments.whole("--expert-model-parallel-size") or 1
    split = arguments.whole("--expert-tensor-parallel-size") or tp
    experts = arguments.peek("--num-experts")
    if ep == 1 and (split == tp or experts is None):
        return ep, 0
    count = (parse_whole(experts) if isinstance(experts, str) else 0) or 0
    if count % ep:
        raise ExportError(
            f"{count} experts are not divisible by --expert-model-parallel-size {ep}",
            hint=f"--expert-model-parallel-size {gcd(count, ep)}",
        )
    for etp in (0, 1):
        inside = _inside(cp, tp, etp)
        if split == (etp or tp) and ep % inside == 0 and dp % (ep // inside) == 0:
            return ep, etp
    stage, group = dp * cp * tp, ep * split
    fits = [size * cp for size in range(1, dp + 1) if dp % size == 0 and count % (size * cp) == 0]
    nearest = max((size for size in fits if size * tp <= group), default=0)
    hint = (
        f"--expert-model-parallel-size {nearest} --expert-tensor-parallel-size {tp} is the nearest: groups of "
        f"{nearest * tp}"
        if nearest
        else f"choose a --context-parallel-size that divides {count} experts"
    )
    if stage % group:
        raise ExportError(
            f"groups of {group} devices (--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {split}) do "
            f"not divide the {stage} devices of a stage: Megatron-LM refuses that",
            hint=hint,
        )
    raise ExportError(
        f"--expert-model-parallel-size {ep} with --expert-tensor-parallel-size {split}, tensor parallelism of {tp} and "
        f"context parallelism of {cp}: Megatron-LM deals experts out over any {group} neighbours; plans here over all "
        f"context-parallel devices and then data-parallel ones, each expert split over {tp} tensor-parallel ones or "
        "whole",
        hint=hint,
    )


def _zero(arguments: Taken) -> int:
    distributed = arguments.flag("--use-distributed-optimizer")
    strategy = arguments.peek("--data-parallel-sharding-strategy")
    if not arguments.flag("--use-megatron-fsdp"):
        return int(distributed)
    arguments.text("--ckpt-format")
    arguments.flag("--no-gradient-accumulation-fusion")
    if strategy is None:
        return int(distributed)
    if strategy not in _SHARDING:
        raise ExportError(
            f"--data-parallel-sharding-strategy {strategy} is not known", hint=f"choose {', '.join(_SHARDING)}"
        )
    arguments.text("--data-parallel-sharding-strategy")
    return _SHARDING[str(strategy)]


def _sharing(arguments: Taken, zero: int, data: int) -> int:
    """Return how many of the data-parallel devices with the same experts share what ZeRO splits; 0 for all."""
    copies = arguments.whole("--num-distributed-optimizer-instances") or 1
    if copies == 1 or not zero:
        return 0
    if data % copies:
        raise ExportError(
            f"{data} data-parallel devices are not divisible by --num-distributed-optimizer-instances {copies}",
            hint=f"--num-distributed-optimizer-instances {gcd(data, copies)}",
        )
    return data // copies


def _recompute(arguments: Taken, layers: tuple[int, ...], stages: int) -> tuple[str, int]:
    """Return what layers recompute, and how many of every stage do; 0 for all."""
    if offloaded := arguments.whole("--cpu-offloading-num-layers"):
        most = (arguments.whole("--num-layers") or 0) - 1
        if most > 0 and offloaded > most:
            raise ExportError(
                f"--cpu-offloading-num-layers {offloaded} of {most + 1}: Megatron-LM keeps the last one on the device",
                hint=f"write {most} at most",
            )
        return "offload", 0 if offloaded == most else offloaded
    granularity = arguments.text("--recompute-granularity")
    if granularity not in (None, "full", "selective"):
        raise ExportError(f"--recompute-granularity {granularity} is not known", hint="write full or selective")
    if granularity is None:
        return "selective" if arguments.flag("--recompute-activations") else "none", 0
    if granularity == "selective":
        return "selective", 0
    method, number = arguments.text("--recompute-method"), arguments.whole("--recompute-num-layers")
    if method not in ("uniform", "block") or number is None:
        raise ExportError(
            "--recompute-granularity full without --recompute-method and --recompute-num-layers; Megatron-LM asks for "
            "both",
            hint="add --recompute-method uniform --recompute-num-layers 1",
        )
    if method == "uniform":  # all layers, whatever the size of a unit
        return "full", 0
    total = arguments.whole("--num-layers")
    longest = max(layers, default=0) or -(-(total or number) // stages)
    return "full", 0 if number >= longest else number


def _offload(arguments: Taken) -> str:
    """Return what lies in host memory between steps."""
    fraction = arguments.peek("--optimizer-offload-fraction")
    if not arguments.flag("--optimizer-cpu-offload"):
        return ""
    arguments.flag("--use-precision-aware-optimizer")
    arguments.flag("--overlap-cpu-optimizer-d2h-h2d")
    if fraction is not None:
        arguments.text("--optimizer-offload-fraction")
        share = _number(fraction) if isinstance(fraction, str) else None
        if share is None or not 0 < share <= 1:
            raise ExportError(
                f"--optimizer-offload-fraction {fraction}",
                hint="write a share above 0 and up to 1, or leave --optimizer-cpu-offload out",
            )
        return "update" if share == 1 else f"update={share}"
    return "update"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _stages(arguments: Taken, pp: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return layers per stage (empty for an even cut), multi-token prediction, and stages per group of devices."""
    layout = arguments.text("--pipeline-model-parallel-layout")
    if not isinstance(layout, str):
        layers, interleave = _stages_by_number(arguments, pp)
        return layers, (), interleave
    number, depth = arguments.whole("--num-layers"), arguments.whole("--mtp-num-layers") or 0
    layers, predictions = parse_layout(layout)
    if len(layers) % pp:
        raise ExportError(f"the layout {layout!r} has {len(layers)} stages for {pp} groups of devices")
    if number is not None and sum(layers) != number:
        raise ExportError(f"the layout {layout!r} has {sum(layers)} layers, --num-layers is {number}")
    if sum(predictions) != depth:
        raise ExportError(
            f"the layout {layout!r} has {sum(predictions)} modules of multi-token prediction, --mtp-num-layers is "
            f"{depth}: Megatron-LM asks for as many",
            hint="write an m for each, after the last t",
        )
    return layers, predictions, len(layers) // pp


def _stages_by_number(arguments: Taken, pp: int) -> tuple[tuple[int, ...], int]:
    """Return layers per stage (empty for an even cut) and stages per group of devices, where no layout states them."""
    number = arguments.whole("--num-layers")
    virtual = arguments.whole("--num-virtual-stages-per-pipeline-rank") or 1
    first = arguments.whole("--decoder-first-pipeline-num-layers")
    last = arguments.whole("--decoder-last-pipeline-num-layers")
    if each := arguments.whole("--num-layers-per-virtual-pipeline-stage"):
        if number is None:
            raise ExportError("--num-layers-per-virtual-pipeline-stage without --num-layers", hint="add --num-layers")
        if number % (pp * each):
            raise ExportError(
                f"{number} layers are not divisible by {pp} groups x {each} layers per stage",
                hint=_with_layout(number, pp),
            )
        return (), number // (pp * each)
    if number is None:
        return (), virtual
    if first is None and last is None:
        return _even_stages(arguments, number, pp, virtual), virtual
    between = pp - (first is not None) - (last is not None)
    rest = number - (first or 0) - (last or 0)
    if virtual > 1 or (rest % between if between else rest):
        raise ExportError(
            f"{rest} layers are not divisible by {between} stages"
            if virtual == 1
            else "--num-virtual-stages-per-pipeline-rank with a first or last stage of its own size is not read",
            hint=_with_layout(number, pp),
        )
    middle = (rest // between,) * between if between else ()
    return (*(() if first is None else (first,)), *middle, *(() if last is None else (last,))), 1


def _even_stages(arguments: Taken, number: int, pp: int, virtual: int) -> tuple[int, ...]:
    """Return layers per stage of an even cut, in which embedding and loss may count as a layer each; empty if equal."""
    embedding, loss = (int(arguments.flag(f"--account-for-{part}-in-pipeline-split")) for part in ("embedding", "loss"))
    stages = pp * virtual
    each, rest = divmod(number + embedding + loss, stages)
    if rest:
        counted = f"{number} layers" + (", embedding and loss counted as layers," if embedding or loss else "")
        raise ExportError(
            f"{counted} are not divisible by {stages} stages: Megatron-LM refuses that, or leaves layers out",
            hint=_with_layout(number, pp),
        )
    if stages == 1 or not (embedding or loss):
        return ()
    return (each - embedding, *(each,) * (stages - 2), each - loss)


def _with_layout(number: int, pp: int) -> str:
    """Return the argument that states an uneven cut: the first stages have a layer more."""
    each, more = divmod(number, pp)
    words = [f"t*{each + (stage < more)}" for stage in range(pp)]
    return f"--pipeline-model-parallel-layout 'E{'|'.join(words)},L'"


def _check_sequence(arguments: Taken, cp: int) -> None:
    """Refuse a sequence that context parallelism does not divide into two parts per device."""
    seq = arguments.whole("--seq-length")
    if cp > 1 and seq is not None and seq % (2 * cp):
        raise ExportError(
            f"--seq-length {seq} is not divisible by 2 x --context-parallel-size {cp}; Megatron-LM refuses that",
            hint=f"--seq-length {-(-seq // (2 * cp)) * 2 * cp}",
        )


_ATTENTION = {"unfused": "unfused", "flash": "fused", "fused": "fused"}
"""What `--attention-backend` makes of attention."""
_GRAPHS = {"none": "none", "local": "partial", "transformer_engine": "partial", "full_iteration": "full"}
"""What `--cuda-graph-impl` launches."""


def _software(arguments: Taken, degrees: Degrees) -> dict[str, object]:
    """Return the fields of the software stack that are stated; what is not stated is left to the stack."""
    found: dict[str, object] = {}
    if arguments.flag("--tp-comm-overlap") and degrees.sequence_parallel:
        found["hides_tp"] = True
    if degrees.ep > 1:
        dispatcher = arguments.peek("--moe-token-dispatcher-type")
        if dispatcher == "flex":
            arguments.text("--moe-token-dispatcher-type")
            arguments.text("--moe-flex-dispatcher-backend")
        if dispatcher in ("flex", "alltoall"):
            found["dispatch"] = "per-node" if dispatcher == "flex" else "all-to-all"
        if arguments.flag("--moe-shared-expert-overlap"):
            _check_shared_overlap(arguments, degrees)
            found["overlaps_shared"] = True
    if modules := _modules(arguments):
        found["recompute_modules"] = modules
    for name, field, values in (
        ("--attention-backend", "attention", _ATTENTION),
        ("--cuda-graph-impl", "graphs", _GRAPHS),
    ):
        if (value := values.get(str(arguments.peek(name)))) is not None:
            arguments.text(name)
            found[field] = value
    arguments.text("--cuda-graph-modules")
    arguments.flag("--no-check-for-nan-in-loss-and-grad")
    if arguments.flag("--cross-entropy-loss-fusion"):
        found["loss"] = "fused" if arguments.text("--cross-entropy-fusion-impl") == "te" else "float32"
    return found


def _check_shared_overlap(arguments: Taken, degrees: Degrees) -> None:
    """Refuse what Megatron-LM refuses beside `--moe-shared-expert-overlap`."""
    dispatcher = arguments.peek("--moe-token-dispatcher-type") or "allgather"
    if dispatcher != "alltoall":
        raise ExportError(
            f"--moe-shared-expert-overlap with --moe-token-dispatcher-type {dispatcher}: Megatron-LM refuses that",
            hint="--moe-token-dispatcher-type alltoall",
        )
    if degrees.schedule == "1f1b-a2a":
        raise ExportError(
            "--moe-shared-expert-overlap with --overlap-moe-expert-parallel-comm: Megatron-LM refuses that",
            hint="leave one of them out",
        )
    modules = arguments.peek("--recompute-modules")
    if arguments.peek("--recompute-granularity") == "selective" and "shared_experts" in str(modules).split():
        raise ExportError(
            "--moe-shared-expert-overlap with --recompute-modules shared_experts: Megatron-LM refuses that",
            hint="leave one of them out",
        )


def _modules(arguments: Taken) -> tuple[str, ...]:
    """Return the modules that selective recompute runs again: the core of attention unless others are named."""
    if arguments.peek("--recompute-granularity") != "selective" and not arguments.flag("--recompute-activations"):
        return ()
    named = arguments.text("--recompute-modules")
    modules = tuple(named.replace(",", " ").split()) if isinstance(named, str) else ("core_attn",)
    known = ABILITIES["megatron"].recompute_modules
    for module in modules:
        if module not in known:
            raise ExportError(f"--recompute-modules has {module!r}", hint=f"Megatron-LM takes {', '.join(known)}")
    return modules


def _schedule(arguments: Taken, pp: int, ep: int, interleave: int) -> str:
    """Return the schedule of a pipeline: the usual one, or the one that overlaps the all-to-all of experts.

    Raises:
        ExportError: If Megatron-LM refuses to overlap it.
    """
    if ep == 1 or not arguments.flag("--overlap-moe-expert-parallel-comm"):
        return ""
    if pp > 1 and interleave == 1:
        raise ExportError(
            "--overlap-moe-expert-parallel-comm in a pipeline without virtual stages, which Megatron-LM refuses",
            hint="add --num-virtual-stages-per-pipeline-rank 2",
        )
    return "1f1b-a2a"


def _context(arguments: Taken, cp: int) -> ContextKind | Literal[""]:
    """Return how attention gets at positions of other devices: by p2p unless it is stated otherwise."""
    given = arguments.text("--cp-comm-type") or "p2p"
    kinds = {name: kind for kind, name in CP_COMM_TYPES.items()} | {_TWO_LEVELS: "ring"}
    if given not in kinds:
        raise ExportError(f"--cp-comm-type is {given!r}", hint=f"Megatron-LM takes {', '.join(kinds)}")
    arguments.text("--hierarchical-context-parallel-sizes")
    return kinds[given] if cp > 1 else ""


def _communication(arguments: Taken, degrees: Degrees, precision: str, assumed: list[str]) -> None:
    """Add what the simulator takes for granted of communication and Megatron-LM does only if it is told to."""
    if degrees.dp * degrees.cp > 1 and not arguments.flag("--overlap-grad-reduce"):
        assumed.append(
            "gradients are reduced while the backward runs; Megatron-LM does that with --overlap-grad-reduce"
        )
    if degrees.zero and degrees.data > 1 and not arguments.flag("--overlap-param-gather"):
        assumed.append("parameters are gathered while compute runs; Megatron-LM does that with --overlap-param-gather")
    dispatcher = arguments.peek("--moe-token-dispatcher-type")
    if degrees.ep > 1 and dispatcher == "alltoall":
        arguments.text("--moe-token-dispatcher-type")
    elif degrees.ep > 1 and dispatcher != "flex":
        assumed.append(
            "tokens go to experts by all-to-all; Megatron-LM's default is --moe-token-dispatcher-type allgather"
        )
    if degrees.cp > 1 and arguments.peek("--cp-comm-type") == _TWO_LEVELS:
        assumed.append(f"context parallelism is a ring over all its devices; Megatron-LM runs {_TWO_LEVELS}")
    size, count = arguments.whole("--ddp-bucket-size"), arguments.whole("--ddp-num-buckets")
    if size is not None and count is not None:
        raise ExportError(
            "--ddp-bucket-size and --ddp-num-buckets both state buckets of gradients: Megatron-LM refuses that",
            hint="give one of them",
        )
    usual = full_bucket(Axis("dp", max(2, degrees.dp * degrees.cp), 1)) / load_policy(precision).gradient_wire
    if size is not None and not 0.5 < size / usual < 2.0:
        assumed.append(f"gradients are reduced in buckets of {usual:,.0f}; --ddp-bucket-size is {size:,}")
    if count is not None:
        assumed.append(f"gradients are reduced in buckets of {usual:,.0f}; --ddp-num-buckets makes {count}")
