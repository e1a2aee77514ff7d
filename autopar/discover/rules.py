"""Records of what discovery found."""

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Literal

import msgspec

from autopar.errors import GraphError
from autopar.ir.graph import Op
from autopar.sharding import Placement, Replicate, parse_placement


@dataclass(frozen=True, slots=True)
class Scaled:
    """A number inside an op that the local op on one shard needs divided by the size of the mesh axis.

    Examples are the target shape of a Reshape, the end of a Slice, the `group` of a Conv.

    Attributes:
        source: Index of the (constant, integer) input that holds the number, or the name of an attribute.
        entry: Position in that tensor or list; 0 for a scalar.
    """

    source: int | str
    entry: int

    def __str__(self) -> str:
        return f"{'#' if isinstance(self.source, int) else ''}{self.source}[{self.entry}]"


@dataclass(frozen=True, slots=True)
class Halo:
    """Rows of the neighbours' blocks that a device needs around its own block of an input.

    A window that slides over a sharded dim reaches beyond the block: the last `before` rows of the previous device and
    the first `after` rows of the next one are put around it. At the two ends of the tensor they are `fill`.

    Attributes:
        input: Index of the input, which is sharded along `dim`.
        dim: Tensor dim.
        before: Rows of the previous device; at most as many as it has.
        after: Rows of the next device; at most as many as it has.
        fill: "zero" or "lowest" (minus infinity, for maxima).
    """

    input: int
    dim: int
    before: int
    after: int
    fill: str = "zero"

    def __str__(self) -> str:
        return f"#{self.input} dim {self.dim} +{self.before}+{self.after}{'' if self.fill == 'zero' else ' lowest'}"


@dataclass(frozen=True, slots=True)
class Replaced:
    """A number in an attribute that is another one on a shard, whatever the number of devices.

    A convolution whose blocks come with their halos has no padding left on that dim.

    Attributes:
        attr: Name of the attribute.
        entry: Position in its list; 0 for a scalar.
        value: The number on a shard.
    """

    attr: str
    entry: int
    value: int

    def __str__(self) -> str:
        return f"{self.attr}[{self.entry}]={self.value}"


@dataclass(frozen=True, slots=True)
class Local:
    """Another op that a device runs in place of this one, because it has to know where its block starts.

    Attributes:
        kind: Its kind, a function of domain `autopar`. It takes the inputs and attributes of the op and one more input,
            last: the position (int64 scalar) in the whole tensor of the first row the device holds along `dim` of
            input `input`. One more attribute, `size`, is the number of rows of the whole tensor along that dim: an
            index counted from the end (-1 is the last row) means nothing without it.
        input: Index of the input, which is sharded along `dim`.
        dim: Tensor dim.
        fewer: Index of an input that has only some rows along `dim`, one for several of the other input's, and stays
            whole (the key heads of grouped queries). The kind is for numbers of devices that do not divide these rows:
            others shard both inputs and run the op itself. None if there is none.
    """

    kind: str
    input: int
    dim: int
    fewer: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} from #{self.input} dim {self.dim}"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op on the devices of one mesh axis, without communication but for halos.

    It is valid on an axis whose size divides every sharded dim of inputs and outputs and every scaled number, and whose
    blocks have the rows its halos ask for.

    Attributes:
        inputs: A placement per input; `Replicate` for absent inputs and shape-like constants.
        outputs: A placement per output.
        scaled: Numbers that have to be divided by the axis size.
        halos: Rows of neighbours that inputs need around their blocks.
        replaced: Numbers in attributes that are other ones on a shard.
        local: What a device runs in place of the op; None if it runs the op itself.
        cyclic: Whether it also holds if every sharded dim of inputs and outputs is sharded block-cyclic, all with
            the same (multiple of their) number of chunks.
        uneven: Whether it also holds on blocks of unequal sizes. Dims of scaled numbers never are.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    scaled: tuple[Scaled, ...] = ()
    halos: tuple[Halo, ...] = ()
    replaced: tuple[Replaced, ...] = ()
    local: Local | None = None
    cyclic: bool = False
    uneven: bool = False

    @property
    def is_replicate(self) -> bool:
        """Whether every device does the whole work."""
        return all(isinstance(placement, Replicate) for placement in (*self.inputs, *self.outputs))

    def __str__(self) -> str:
        inputs, outputs = (",".join(map(str, placements)) for placements in (self.inputs, self.outputs))
        notes = [f" {verb} {', '.join(map(str, items))}" for verb, items in self._notes() if items]
        return f"{inputs} -> {outputs}{''.join(notes)}"

    def _notes(self) -> tuple[tuple[str, tuple[object, ...]], ...]:
        """Return what changes inside the op, by verb."""
        local = () if self.local is None else (self.local,)
        return (("scaling", self.scaled), ("with halo", self.halos), ("with", self.replaced), ("as", local))


@dataclass(frozen=True, slots=True)
class Rule:
    """All strategies of one distinct op.

    Attributes:
        kind: Op kind.
        strategies: The first replicates everything.
        signature: Hash of all that the rule depends on: kind, attributes, opset and the shrunk op.
        input_ranks: Rank per input; None for an absent input or a shape-like constant.
        output_ranks: Rank per output.
        num_executions: How often the op was run to find the rule.
        reason: Why there is nothing but replication, why the search stopped early, or what else may have cost a
            strategy; "" if nothing did.
        shapes: The small shapes the op was run on, as text: those on which strategies were found with 2 devices, then
            those on which they were confirmed, with 3 where 3 divides them.
        settings: The attributes of the op on them, as text.
        seconds: Wall time of finding it, in the run that did.
    """

    kind: str
    strategies: tuple[Strategy, ...]
    signature: str
    input_ranks: tuple[int | None, ...]
    output_ranks: tuple[int, ...]
    num_executions: int
    reason: str = ""
    shapes: tuple[str, ...] = ()
    settings: str = ""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """The rules of all ops of a graph.

    Attributes:
        by_op: Rule by op name; ops of the same signature share one.
        num_executions: Op executions in this run; 0 if everything came from the cache.
        num_cached: Distinct rules that came from the cache.
        seconds: Wall time.
        executed: Signatures of the rules found in this run; the others came from the cache.
    """

    by_op: Mapping[str, Rule]
    num_executions: int
    num_cached: int
    seconds: float
    executed: frozenset[str] = frozenset()

    def of(self, op: Op) -> Rule:
        """Return the rule of an op.

        Raises:
            GraphError: If the op does not belong to the graph the rules were discovered for.
        """
        rule = self.by_op.get(op.name)
        if rule is None or rule.kind != op.kind:
            raise GraphError(
                f"there is no rule for op {op.name!r} of kind {op.kind!r}", hint="run discover() on its graph"
            )
        return rule

    def __len__(self) -> int:
        """Return the number of distinct rules."""
        return len({rule.signature for rule in self.by_op.values()})

    def __iter__(self) -> Iterator[Rule]:
        """Iterate over the distinct rules in order of first use."""
        return iter({rule.signature: rule for rule in self.by_op.values()}.values())

    @property
    def unsharded(self) -> tuple[Rule, ...]:
        """The rules that may lack strategies, down to those that only replicate; `reason` says why."""
        return tuple(rule for rule in self if rule.reason)


def rule_to_json(rule: Rule) -> dict[str, Any]:
    """Return a rule as JSON data."""
    return {
        "kind": rule.kind,
        "signature": rule.signature,
        "inputRanks": list(rule.input_ranks),
        "outputRanks": list(rule.output_ranks),
        "executions": rule.num_executions,
        "seconds": rule.seconds,
        "settings": rule.settings,
        "shapes": list(rule.shapes),
        "reason": rule.reason,
        "strategies": [_strategy_to_json(strategy) for strategy in rule.strategies],
    }


def _strategy_to_json(strategy: Strategy) -> dict[str, Any]:
    data: dict[str, Any] = {
        "inputs": [str(placement) for placement in strategy.inputs],
        "outputs": [str(placement) for placement in strategy.outputs],
        "scaled": [[scaled.source, scaled.entry] for scaled in strategy.scaled],
        "halos": [[halo.input, halo.dim, halo.before, halo.after, halo.fill] for halo in strategy.halos],
        "replaced": [[number.attr, number.entry, number.value] for number in strategy.replaced],
        "local": list(astuple(strategy.local)) if strategy.local else None,
        "cyclic": strategy.cyclic,
        "uneven": strategy.uneven,
    }
    return {key: value for key, value in data.items() if value or key in ("inputs", "outputs")}


class _StrategyRecord(msgspec.Struct):
    """The JSON of a strategy."""

    inputs: list[str]
    outputs: list[str]
    scaled: tuple[tuple[int | str, int], ...] = ()
    halos: tuple[tuple[int, int, int, int, Literal["zero", "lowest"]], ...] = ()
    replaced: tuple[tuple[str, int, int], ...] = ()
    local: tuple[str, int, int, int | None] | None = None
    cyclic: bool = False
    uneven: bool = False

    def strategy(self) -> Strategy:
        """Return the strategy."""
        return Strategy(
            inputs=tuple(map(parse_placement, self.inputs)),
            outputs=tuple(map(parse_placement, self.outputs)),
            scaled=tuple(Scaled(*scaled) for scaled in self.scaled),
            halos=tuple(Halo(*halo) for halo in self.halos),
            replaced=tuple(Replaced(*number) for number in self.replaced),
            local=None if self.local is None else Local(*self.local),
            cyclic=self.cyclic,
            uneven=self.uneven,
        )


class _RuleRecord(msgspec.Struct, rename="camel"):
    """The JSON of a rule."""

    kind: str
    strategies: tuple[_StrategyRecord, ...]
    signature: str
    input_ranks: tuple[int | None, ...]
    output_ranks: tuple[int, ...]
    executions: int
    reason: str
    shapes: tuple[str, ...]
    settings: str
    seconds: float


def rule_from_json(data: Mapping[str, Any]) -> Rule:
    """Return the rule `rule_to_json` wrote.

    Raises:
        msgspec.ValidationError: If the data is no rule.
        ShardingError: If a placement in it is none.
    """
    record = msgspec.convert(data, _RuleRecord)
    return Rule(
        kind=record.kind,
        strategies=tuple(strategy.strategy() for strategy in record.strategies),
        signature=record.signature,
        input_ranks=record.input_ranks,
        output_ranks=record.output_ranks,
        num_executions=record.executions,
        reason=record.reason,
        shapes=record.shapes,
        settings=record.settings,
        seconds=record.seconds,
    )
