"""Software stacks: what a framework makes of the hardware, as a few choices and at most ten bounded numbers.

A cluster says what devices and links can do; a stack says what a training framework gets out of them. Its scalars are
the only numbers that calibration may change, and each is bounded, so that a fit cannot buy accuracy on its data with
numbers that no machine has.

`SCALARS` is the table of them: default, bounds, unit and meaning. With all defaults nothing but the cluster counts.
A stack is bundled by name (`stacks/*.yaml`) or a YAML file; docs/cost_model.md has the schema.
"""

import datetime
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from autopar.context_parallelism import CONTEXT_KINDS, ContextKind
from autopar.cost.reserve import CONTEXT, GAPS, MOST_GAPS, MOST_OUTSIDE
from autopar.errors import StackError
from autopar.reading import UnreadableError, check, parse_yaml
from autopar.recompute import RECOMPUTE_MODULES
from autopar.units import format_quantity, parse_quantity

Attention = Literal["fused", "unfused"]
"""Kernels of attention: one that keeps no scores (flash), or two batched products with a softmax between them."""

Fusion = Literal["chains", "none"]
"""Whether neighbouring element-wise ops are one kernel, or one each."""

Dispatch = Literal["all-to-all", "per-node"]
"""What brings tokens to their experts: an all-to-all with a copy for every expert of a token (Megatron-Core's
`alltoall`), or a kernel that sends a token once to each node, and there once to each device, that has experts of its
own (DeepEP, HybridEP)."""

Graphs = Literal["none", "partial", "full"]
"""What CUDA graphs launch: nothing, all but what depends on how many tokens an expert has (attention, norms, router),
or all of a step."""

Experts = Literal["each", "grouped", "fused"]
"""Kernels of the products of a device's experts: one per expert, with casts of their own (`GroupedLinear` of
Transformer Engine over cuBLAS), one for all experts, or one for all with activation and cast in it (the CuTe DSL
kernels of cuDNN's frontend)."""

Loss = Literal["fused", "float32", "eager"]
"""Memory of a cross-entropy: "fused" kernels keep nothing beside the logits (Transformer Engine, torch.compile);
"float32" keeps the probabilities in float32 (Megatron-LM's vocabulary-parallel loss); "eager" besides holds two float32
copies of the logits in the backward (`torch.nn.functional.cross_entropy` kernel by kernel)."""


Gradients = Literal["kept", "made"]
"""Whether sums of gradients outlive a step, as the buffers of Megatron-LM and DDP do, or are made by the first backward
of a step and freed after the update, as those of FSDP2 are."""


Gathers = Literal["block", "parameter"]
"""What of sharded parameters one collective gathers: those of a block (FSDP, Megatron FSDP, XLA's combiner of gathers),
or each by itself (ZeRO-3 of DeepSpeed, which fetches the parameters of a module as that runs)."""


Selective = Literal["cheap", "alternate"]
"""What selective recompute runs again: ops that are "cheap" for the bytes they leave behind (norms, activation
functions, the scores of unfused attention), or all but attention and every other product with parameters ("alternate":
torchtitan's selective checkpointing by op, `torchtitan/distributed/activation_checkpoint.py`)."""


Dropout = Literal["none", "scores", "layers", "adapters"]
"""What dropout leaves masks and copies of for the backward: nothing; the "scores" of unfused attention; those and the
two sums of a layer with what it adds to its input (Megatron-LM's `--hidden-dropout`, 0.1 by default: "layers"); the
scores and what adapters read (dropout before the first matrix of LoRA: "adapters")."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number of a stack that calibration may change.

    Attributes:
        default: Value of the stack that knows nothing but the cluster.
        low: Least value a stack may have.
        high: Greatest value a stack may have.
        unit: "s" for seconds, "" for a factor or a share.
        meaning: What it does.
    """

    default: float
    low: float
    high: float
    unit: str
    meaning: str


SCALARS: Mapping[str, Scalar] = {
    "gemm_efficiency": Scalar(1.0, 0.5, 1.3, "", "factor on the device's gemm_efficiency"),
    "attention_efficiency": Scalar(
        1.0, 0.3, 2.0, "", "factor on the share of the peak that attention reaches, fused or as batched products"
    ),
    "memory_traffic": Scalar(1.0, 0.7, 3.0, "", "factor on the bytes of kernels bound by memory"),
    # PyTorch's eager mode spends 5 to 30 us of Python and dispatch per kernel; CUDA graphs next to nothing.
    "host_launch": Scalar(0.0, 0.0, 60e-6, "s", "seconds of the host per kernel; a block cannot be faster"),
    "intra_slowdown": Scalar(1.0, 0.7, 2.0, "", "factor on the seconds of transfers inside a node"),
    "inter_slowdown": Scalar(1.0, 0.5, 3.0, "", "factor on the seconds of transfers between nodes"),
    # 1.13 was measured by Hetu-Galvatron; bounded by running one after the other.
    "overlap_slowdown": Scalar(1.0, 1.0, 2.0, "", "factor on compute and on communication while both run"),
    "exposed_share": Scalar(0.0, 0.0, 1.0, "", "share of communication that could overlap and does not"),
    "interleave_overhead": Scalar(
        0.0, 0.0, 0.2, "", "share of a pass added per pass when a device holds several stages"
    ),
    "step_seconds": Scalar(0.0, 0.0, 1.0, "s", "seconds added to every step"),
}
"""Every scalar of a stack by name."""


@dataclass(frozen=True, slots=True)
class FitSource:
    """Measurements that went into a fit: where they were published and how many rows of them."""

    source: str
    rows: int


@dataclass(frozen=True, slots=True)
class Range:
    """Range of a property of the measurements ("gpus", "hidden size"): outside it the fit extrapolates."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Fit:
    """How the scalars of a stack were found.

    Attributes:
        date: Day of the fit.
        error: Mean absolute error of step times on the rows of the fit, as a share of the measured time.
        p90: The error that 90 % of them do not exceed.
        fitted: Names of the scalars that were free.
        data: What they were fitted to.
        valid: Ranges the rows cover.
        held_out: Mean absolute error on rows that the fit did not see; None if there were none.
    """

    date: datetime.date
    error: float
    p90: float
    fitted: tuple[str, ...]
    data: tuple[FitSource, ...]
    valid: tuple[Range, ...] = ()
    held_out: float | None = None

    def __post_init__(self) -> None:
        for name in self.fitted:
            if name not in SCALARS:
                raise StackError(f"fit.fitted names the scalar {name!r}", hint=f"there are {', '.join(SCALARS)}")
        errors = {"error": self.error, "p90": self.p90, "held_out": 0.0 if self.held_out is None else self.held_out}
        for name, error in errors.items():
            if not (math.isfinite(error) and error >= 0):
                raise StackError(f"fit.{name} is {error:g}", hint="it is a share: 0.04 for 4 %")
        for source in self.data:
            if source.rows < 1:
                raise StackError(f"fit.data: {source.source!r} has {source.rows} rows", hint="rows is 1 or more")
        for valid in self.valid:
            if not valid.low <= valid.high:
                raise StackError(
                    f"fit.valid.{valid.name} is from {valid.low:g} to {valid.high:g}", hint="write [lowest, highest]"
                )

    @property
    def rows(self) -> int:
        """Number of measurements."""
        return sum(source.rows for source in self.data)


@dataclass(frozen=True, slots=True)
class Stack:
    """A software stack on one kind of device.

    Attributes:
        name: Its name.
        attention: Kernels that run an `Attention` op.
        fusion: Whether chains of element-wise ops are one kernel.
        loss: What a cross-entropy holds beside its logits.
        gradients: How long sums of gradients take memory.
        scalars: Value by name for those that are not at their default, in the order of `SCALARS`.
        clusters: Presets it was made for; none if it says nothing of one kind of hardware.
        fit: How its scalars were found; None if they were not fitted.
        dispatch: What brings tokens to their experts.
        hides_dispatch: Whether tokens travel to experts and back beside the compute of another microbatch, as with
            Megatron-Core's `--overlap-moe-expert-parallel-comm`.
        overlaps_shared: Whether tokens travel to experts and back beside the shared experts of their own layer, as with
            Megatron-Core's `--moe-shared-expert-overlap`; of no effect where `hides_dispatch` hides them.
        hides_tp: Whether gathers and reduce-scatters of tensor parallelism run in chunks beside the products next to
            them: `--tp-comm-overlap` of Megatron-LM (user buffers of Transformer Engine), async TP of PyTorch. Both
            need sequence parallelism: an all-reduce waits for the whole product.
        gathers: What of sharded parameters one collective gathers.
        graphs: What CUDA graphs launch; it takes the host no time.
        experts: Kernels of the products of a device's experts.
        context: Kind of context parallelism that plans by degrees have unless they say otherwise: `--cp-comm-type p2p`
            of Megatron-LM is a ring, FSDP2's `allgather` of torchtitan and MaxText gather, DeepSpeed exchanges heads.
        selective: What selective recompute runs again.
        recompute_modules: Modules of layers that selective recompute runs again, names of
            `autopar.recompute.RECOMPUTE_MODULES`; none for what frees the most bytes for its seconds.
        recompute_among: Modules that the framework can be told to run again. Where `recompute_modules` is empty,
            selective recompute runs again the modules of this list that free the most bytes for their seconds. If this
            list is empty, too, selective recompute chooses single ops.
        uneven: Whether a vocabulary may be dealt out in uneven blocks, or padded to the same size.
        dropout: What dropout leaves masks of.
        gaps: What the allocator has reserved besides what is allocated, as a share of it; 0 for memory that is planned
            ahead.
        outside: Bytes that the driver shows besides what the allocator has reserved: context, libraries, NCCL.
    """

    name: str
    attention: Attention = "fused"
    fusion: Fusion = "chains"
    scalars: tuple[tuple[str, float], ...] = ()
    clusters: tuple[str, ...] = ()
    fit: Fit | None = None
    dispatch: Dispatch = "all-to-all"
    hides_dispatch: bool = False
    graphs: Graphs = "none"
    experts: Experts = "grouped"
    loss: Loss = "fused"
    gradients: Gradients = "kept"
    hides_tp: bool = False
    context: ContextKind = "ring"
    selective: Selective = "cheap"
    recompute_modules: tuple[str, ...] = ()
    recompute_among: tuple[str, ...] = ()
    uneven: bool = True
    dropout: Dropout = "scores"
    gaps: float = GAPS
    outside: float = CONTEXT
    gathers: Gathers = "block"
    overlaps_shared: bool = False

    def __post_init__(self) -> None:
        choices: tuple[str, ...]
        for field, chosen, choices in (
            ("attention", self.attention, get_args(Attention)),
            ("fusion", self.fusion, get_args(Fusion)),
            ("dispatch", self.dispatch, get_args(Dispatch)),
            ("graphs", self.graphs, get_args(Graphs)),
            ("experts", self.experts, get_args(Experts)),
            ("loss", self.loss, get_args(Loss)),
            ("gradients", self.gradients, get_args(Gradients)),
            ("gathers", self.gathers, get_args(Gathers)),
            ("context", self.context, CONTEXT_KINDS),
            ("selective", self.selective, get_args(Selective)),
            ("dropout", self.dropout, get_args(Dropout)),
        ):
            if chosen not in choices:
                raise StackError(f"stack {self.name!r}: {field} is {chosen!r}", hint=f"it is {' or '.join(choices)}")
        if not 0 <= self.gaps <= MOST_GAPS:
            raise StackError(
                f"stack {self.name!r}: gaps is {self.gaps:g}", hint=f"gaps is a share from 0 to {MOST_GAPS:g}"
            )
        if not 0 <= self.outside <= MOST_OUTSIDE:
            raise StackError(
                f"stack {self.name!r}: outside is {format_quantity(self.outside, 'B')}",
                hint=f"outside is from 0 B to {format_quantity(MOST_OUTSIDE, 'B')}",
            )
        for field in ("recompute_modules", "recompute_among"):
            named = getattr(self, field)
            for module in named:
                if module not in RECOMPUTE_MODULES:
                    raise StackError(
                        f"stack {self.name!r}: {field} has {module!r}",
                        hint=f"modules are {', '.join(RECOMPUTE_MODULES)}",
                    )
            object.__setattr__(self, field, tuple(own for own in RECOMPUTE_MODULES if own in named))
        values = dict(self.scalars)
        for name, value in values.items():
            scalar = SCALARS.get(name)
            if scalar is None:
                close = get_close_matches(name, SCALARS, n=1, cutoff=0.5)
                nearest = f"did you mean {close[0]}? " if close else ""
                raise StackError(
                    f"stack {self.name!r} has no scalar {name!r}", hint=f"{nearest}there are {', '.join(SCALARS)}"
                )
            if not scalar.low <= value <= scalar.high:
                low, high = (format_scalar(name, bound) for bound in (scalar.low, scalar.high))
                raise StackError(
                    f"stack {self.name!r}: {name} is {format_scalar(name, value)}",
                    hint=f"{name} is from {low} to {high}: {scalar.meaning}",
                )
        ordered = tuple(
            (name, values[name]) for name in SCALARS if values.get(name, SCALARS[name].default) != SCALARS[name].default
        )
        object.__setattr__(self, "scalars", ordered)

    def __getitem__(self, name: str) -> float:
        """Return the value of a scalar, a key of `SCALARS`.

        >>> Stack("mine", scalars=(("memory_traffic", 2.4),))["memory_traffic"], IDEAL["host_launch"]
        (2.4, 0.0)
        """
        return next((value for known, value in self.scalars if known == name), SCALARS[name].default)

    @property
    def covers_rows(self) -> bool:
        """Whether the all-to-all of routed experts runs beside the kernels of shared experts."""
        return self.overlaps_shared and not self.hides_dispatch

    def overlapped(self) -> "Stack":
        """Return the stack under a schedule that hides the dispatch whatever the stack does."""
        return self if self.hides_dispatch else replace(self, hides_dispatch=True)

    def overlapping_shared(self, overlaps: bool | None) -> "Stack":
        """Return the stack with or without tokens that travel beside shared experts; None leaves it as it is."""
        return self if overlaps is None else replace(self, overlaps_shared=overlaps)

    def recomputing(self, modules: tuple[str, ...]) -> "Stack":
        """Return the stack with modules that selective recompute runs again; without any it stays as it is.

        Raises:
            StackError: If there is no such module.
        """
        return replace(self, recompute_modules=modules) if modules else self

    def with_scalars(self, **values: float) -> "Stack":
        """Return the stack with other values of some scalars.

        Raises:
            StackError: If there is no such scalar, or a value is out of its bounds.
        """
        return replace(self, scalars=tuple({**dict(self.scalars), **values}.items()))

    @property
    def at_bounds(self) -> tuple[str, ...]:
        """Fitted scalars that lie on one of their bounds: the data asked for more than is believable."""
        fitted = () if self.fit is None else self.fit.fitted
        return tuple(
            name
            for name in fitted
            if min(self[name] - SCALARS[name].low, SCALARS[name].high - self[name])
            <= 1e-6 * (SCALARS[name].high - SCALARS[name].low)
        )

    def to_dict(self) -> dict[str, object]:
        """Return the stack as the mapping a stack file holds; `stack_from_dict` reads it back equal."""
        data: dict[str, object] = {"name": self.name, "attention": self.attention, "fusion": self.fusion}
        if self.dispatch != IDEAL.dispatch:
            data["dispatch"] = self.dispatch
        if self.hides_dispatch:
            data["hides_dispatch"] = True
        if self.overlaps_shared:
            data["overlaps_shared"] = True
        if self.hides_tp:
            data["hides_tp"] = True
        if self.graphs != IDEAL.graphs:
            data["graphs"] = self.graphs
        if self.experts != IDEAL.experts:
            data["experts"] = self.experts
        if self.loss != IDEAL.loss:
            data["loss"] = self.loss
        if self.gradients != IDEAL.gradients:
            data["gradients"] = self.gradients
        if self.gathers != IDEAL.gathers:
            data["gathers"] = self.gathers
        if self.context != IDEAL.context:
            data["context"] = self.context
        if self.selective != IDEAL.selective:
            data["selective"] = self.selective
        if self.recompute_modules:
            data["recompute_modules"] = list(self.recompute_modules)
        if self.recompute_among:
            data["recompute_among"] = list(self.recompute_among)
        if not self.uneven:
            data["uneven"] = False
        if self.dropout != IDEAL.dropout:
            data["dropout"] = self.dropout
        if self.gaps != IDEAL.gaps:
            data["gaps"] = self.gaps
        if self.outside != IDEAL.outside:
            data["outside"] = format_quantity(self.outside, "B")
        if self.clusters:
            data["clusters"] = list(self.clusters)
        if self.scalars:
            data["scalars"] = {
                name: format_quantity(value, unit) if (unit := SCALARS[name].unit) else value
                for name, value in self.scalars
            }
        if self.fit is not None:
            fit = self.fit
            data["fit"] = {
                "date": fit.date.isoformat(),
                "error": fit.error,
                "p90": fit.p90,
                **({} if fit.held_out is None else {"held_out": fit.held_out}),
                "fitted": list(fit.fitted),
                "data": {source.source: source.rows for source in fit.data},
                "valid": {valid.name: [valid.low, valid.high] for valid in fit.valid},
            }
        return data


NEAREST = "default"
"""Name of the choice of a stack by its cluster (`autopar.cost.nearest`)."""
IDEAL = Stack("ideal")
"""What the cluster's description says, and nothing else: no time of the host, all that can overlap does."""


def format_scalar(name: str, value: float) -> str:
    """Return the value of a scalar for reading.

    >>> format_scalar("host_launch", 12e-6), format_scalar("memory_traffic", 2.4)
    ('12 us', '2.4')
    """
    return format_quantity(float(f"{value:.4g}"), "s") if SCALARS[name].unit == "s" else f"{value:.4g}"


_Quantity = str | int | float
"""A number is accepted by the schema so that the error can ask for its unit."""


class _FitFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    date: Any  # YAML reads a day, JSON a text
    error: float
    p90: float
    fitted: tuple[str, ...]
    data: dict[str, int]
    valid: dict[str, tuple[float, float]] = {}
    held_out: float | None = None


class _StackFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    attention: str = IDEAL.attention
    fusion: str = IDEAL.fusion
    dispatch: str = IDEAL.dispatch
    hides_dispatch: bool = False
    overlaps_shared: bool = False
    hides_tp: bool = False
    graphs: str = IDEAL.graphs
    experts: str = IDEAL.experts
    loss: str = IDEAL.loss
    gradients: str = IDEAL.gradients
    gathers: str = IDEAL.gathers
    context: str = IDEAL.context
    selective: str = IDEAL.selective
    recompute_modules: tuple[str, ...] = ()
    recompute_among: tuple[str, ...] = ()
    uneven: bool = IDEAL.uneven
    dropout: str = IDEAL.dropout
    gaps: float = IDEAL.gaps
    outside: str = ""
    clusters: tuple[str, ...] = ()
    scalars: dict[str, _Quantity] = {}
    fit: _FitFile | None = None


def _scalar(name: str, value: _Quantity) -> float:
    scalar = SCALARS.get(name)
    if scalar is None:  # `Stack` refuses it with the names there are
        return math.nan
    if scalar.unit:
        hint = f"{name} is in {scalar.unit}, written like '12 us'"
        if not isinstance(value, str):
            raise StackError(f"scalars.{name}: {value} has no unit", hint=hint)
        try:
            return parse_quantity(value, scalar.unit)
        except ValueError as error:
            raise StackError(f"scalars.{name}: {error}", hint=hint) from error
    if isinstance(value, str):
        raise StackError(f"scalars.{name}: {value!r} is a text", hint=f"{name} is a number without a unit")
    return float(value)


def _bytes(text: str) -> float:
    try:
        return parse_quantity(text, "B")
    except ValueError as error:
        raise StackError(f"outside: {error}", hint="outside is in bytes, written like '1.5 GB'") from error


def _day(value: object) -> datetime.date:
    try:
        return datetime.date.fromisoformat(str(value))
    except ValueError:
        raise StackError(f"fit.date is {value!r}", hint="write a day as YYYY-MM-DD") from None


def _stack(source: str, data: _StackFile) -> Stack:
    try:
        fit = None
        if data.fit is not None:
            fit = Fit(
                date=_day(data.fit.date),
                error=data.fit.error,
                p90=data.fit.p90,
                fitted=data.fit.fitted,
                data=tuple(FitSource(name, rows) for name, rows in data.fit.data.items()),
                valid=tuple(Range(name, low, high) for name, (low, high) in data.fit.valid.items()),
                held_out=data.fit.held_out,
            )
        return Stack(
            name=data.name,
            attention=data.attention,  # type: ignore[arg-type]  # checked by Stack
            fusion=data.fusion,  # type: ignore[arg-type]
            dispatch=data.dispatch,  # type: ignore[arg-type]
            hides_dispatch=data.hides_dispatch,
            overlaps_shared=data.overlaps_shared,
            graphs=data.graphs,  # type: ignore[arg-type]
            experts=data.experts,  # type: ignore[arg-type]
            scalars=tuple((name, _scalar(name, value)) for name, value in data.scalars.items()),
            clusters=data.clusters,
            fit=fit,
            loss=data.loss,  # type: ignore[arg-type]
            gradients=data.gradients,  # type: ignore[arg-type]
            gathers=data.gathers,  # type: ignore[arg-type]
            hides_tp=data.hides_tp,
            context=data.context,  # type: ignore[arg-type]
            selective=data.selective,  # type: ignore[arg-type]
            recompute_modules=data.recompute_modules,
            recompute_among=data.recompute_among,
            uneven=data.uneven,
            dropout=data.dropout,  # type: ignore[arg-type]
            gaps=data.gaps,
            outside=_bytes(data.outside) if data.outside else IDEAL.outside,
        )
    except StackError as error:
        raise StackError(f"{source}: {error.args[0]}", hint=error.hint) from error


_SCHEMA = "docs/cost_model.md lists the fields of a stack file, with an example"


def _read(source: str, load: Callable[[], object]) -> Stack:
    try:
        parsed = msgspec.convert(load(), _StackFile)
    except UnreadableError as error:
        raise StackError(error.in_file(source), hint=_SCHEMA) from error
    except msgspec.ValidationError as error:
        raise StackError(f"{source}: {error}", hint=_SCHEMA) from error
    return _stack(source, parsed)


def stack_from_dict(data: object, source: str = "stack") -> Stack:
    """Return the stack that `Stack.to_dict` wrote, or that a stack file holds.

    Args:
        data: The mapping.
        source: What to call it in errors.

    Raises:
        StackError: If a field is missing, unknown, of the wrong type or unit, or out of its bounds.
    """

    def load() -> object:
        check(data)
        return data

    return _read(source, load)


def parse_stack(text: str, source: str = "stack") -> Stack:
    """Return the stack a YAML text describes.

    Raises:
        StackError: If the text is no YAML, or as for `stack_from_dict`.
    """
    return _read(source, lambda: parse_yaml(text))


def format_stack(stack: Stack) -> str:
    """Return the YAML text of a stack; `parse_stack` reads it back equal."""
    return msgspec.yaml.encode(stack.to_dict()).decode()


@cache
def bundled_stacks() -> Mapping[str, Stack]:
    """Return the stacks known by name: the ideal one, then those that come with the package."""
    stacks = {IDEAL.name: IDEAL}
    for file in sorted(resources.files("autopar.cost").joinpath("stacks").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            stack = parse_stack(file.read_text(encoding="utf-8"), file.name)
            assert file.name == f"{stack.name}.yaml", f"{file.name} holds the stack {stack.name!r}"
            stacks[stack.name] = stack
    return stacks


def load_stack(name_or_path: str | Path) -> Stack:
    """Return a bundled stack by name, or the stack a YAML file describes.

    Args:
        name_or_path: A key of `bundled_stacks()`, or the path of a `.yaml` or `.yml` file.

    Raises:
        StackError: If there is no such stack or file, or the file is wrong.

    >>> load_stack("ideal") == IDEAL
    True
    """
    path = Path(name_or_path)
    known = bundled_stacks()
    if path.suffix not in (".yaml", ".yml"):
        name = str(name_or_path)
        stack = known.get(name.lower())
        if stack is None:
            names = [NEAREST, *known]
            close = get_close_matches(name.lower(), names, n=2, cutoff=0.4)
            nearest = f"did you mean {' or '.join(close)}? " if close else ""
            raise StackError(
                f"there is no stack {name!r}",
                hint=f"{nearest}known are {', '.join(names)}, or give the path of a .yaml file",
            )
        return stack
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StackError(f"{path} cannot be read: {error}", hint=f"known stacks are {', '.join(known)}") from error
    return parse_stack(text, str(path))
