"""Low-rank adapters on a forward graph (LoRA: Hu et al. 2021, arXiv:2106.09685), on a base of 16 or 4 bits (QLoRA).

Of every product y = x W with a targeted parameter W [in, out]:

    y = x W + (alpha / rank) (x A) B        A [in, rank], B [rank, out]

A and B are trained, all parameters of the model are frozen: norms, biases, embeddings and the head too. Names are those
of peft: `q_proj.weight` gets `q_proj.lora_A.weight` and `q_proj.lora_B.weight`. Parts of one matrix of a checkpoint
(`qkv_proj.weight.q`) share its A, as in peft. Matrices per expert [experts, in, out] get an adapter per expert.

With `base=nf4` (Dettmers et al. 2023, arXiv:2305.14314) the matrices of the layers are stored in 4 bits with a float32
scale per block of 64: 0.5625 bytes per element, in memory, on the wire and as products read them. The graph computes
with whole numbers all the same. Matrices per expert and whatever lies outside the layers stay as they are.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import isfinite, sqrt

from autopar.errors import JobError
from autopar.ir.graph import FROZEN, STORED, Graph, Op, Role, State
from autopar.training.layer_weights import GROUPED, in_layers, product_weights
from autopar.training.tape import Tape

NF4 = "nf4"
NF4_BYTES = 4 / 8 + 4 / 64
"""Bytes of a weight: 4 bits, and a float32 scale per 64 weights, as in bitsandbytes without double quantisation."""
GROUPS = ("attention", "mlp", "all")
"""Targets that are no names: products of layers with "attn" or "attention" in the weight's name, the others, both."""
_ATTENTION = ("attn", "attention")
_A, _B = "lora_A", "lora_B"
PATTERN = "pattern="
"""What a regular expression follows where adapters are written down; it is the last part, for it may hold commas."""
_SHOWN = 12
"""Names of modules that an error lists."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters to be trained in place of a model.

    Attributes:
        rank: Columns of A.
        alpha: The adapter counts alpha / rank times; 8 by default, as in peft.
        targets: Parts of the names of weights, whole words between dots ("q_proj", "self_attn.q_proj"), or some of
            `GROUPS`.
        rank_stabilised: Whether it counts alpha / sqrt(rank) times (rsLoRA).
        base: "" for a base stored as the job's precision has it, "nf4" for 4 bits.
        pattern: A regular expression that the whole names of targeted modules match ("model.layers.3.mlp.up_proj"), as
            peft's `target_modules` may be one; "" for `targets`.
        shared: Whether products that read the same value share one A, as on the fused matrices of Megatron-LM
            (`linear_qkv`, `linear_fc1`): queries, keys and values, or gate and input of an MLP.

    Raises:
        JobError: If a number is not positive, there is no target, the base is unknown, or the pattern is no regular
            expression.
    """

    rank: int = 8
    alpha: float = 8.0
    targets: tuple[str, ...] = ("all",)
    rank_stabilised: bool = False
    base: str = ""
    pattern: str = ""
    shared: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise JobError(f"LoRA of rank {self.rank}", hint="rank takes a whole number from 1 on")
        if not (isfinite(self.alpha) and self.alpha > 0):
            raise JobError(f"LoRA with alpha {self.alpha}", hint="alpha takes a number above 0")
        if not self.targets or not all(self.targets):
            raise JobError("LoRA without targets", hint=f"targets takes {', '.join(GROUPS)}, or names of weights")
        if self.base not in ("", NF4):
            raise JobError(f"LoRA on a base in {self.base!r}", hint=f"base takes {NF4}; leave it out for 16 bits")
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise JobError(
                f"LoRA pattern {self.pattern!r} is no regular expression: {error}",
                hint=r"write it as Python does, such as .*\.(q|v)_proj",
            ) from None

    @property
    def scale(self) -> float:
        """How often the adapter counts."""
        return self.alpha / (sqrt(self.rank) if self.rank_stabilised else self.rank)

    def __str__(self) -> str:
        """Return the adapters as `--lora` takes them.

        >>> str(Lora(16, targets=("q", "v"), base="nf4"))
        'rank=16,alpha=8,targets=q:v,base=nf4'
        """
        stabilised = ",rslora=true" if self.rank_stabilised else ""
        base = f",base={self.base}" if self.base else ""
        shared = ",shared=true" if self.shared else ""
        targets = "" if self.pattern else f",targets={':'.join(self.targets)}"
        pattern = f",{PATTERN}{self.pattern}" if self.pattern else ""
        return f"rank={self.rank},alpha={self.alpha:g}{targets}{stabilised}{base}{shared}{pattern}"


def add_adapters(graph: Graph, lora: Lora) -> Graph:
    """Return a forward graph with adapters, in which everything else is frozen.

    Args:
        graph: The forward graph, before blocks are found.
        lora: The adapters.

    Raises:
        JobError: If a target is no product of the graph.
    """
    products = product_weights(graph)
    layers = in_layers(products.values())
    if lora.pattern:
        targeted = _matching(products.values(), lora.pattern)
    else:
        targeted = _targeted(products.values(), layers, lora.targets)
    writer = _Writer(graph, lora)
    for op in graph.ops:
        weight = products.get(op.name, "")
        if weight in targeted:
            writer.write(op)
        else:
            writer.tape.ops.append(op)
    return writer.graph(_quantised(graph, products, layers) if lora.base else frozenset())


class _Writer:
    """Writes a graph with adapters, op by op.

    Attributes:
        tape: The graph so far.
    """

    def __init__(self, graph: Graph, lora: Lora) -> None:
        self.tape = Tape(replace(graph, ops=()))
        self._graph, self._lora = graph, lora
        self._adapters: dict[str, None] = {}
        self._halves: dict[tuple[str, str], str] = {}
        self._shared: dict[str, str] = {}  # value -> the A that products of it share

    def graph(self, quantised: Set[str]) -> Graph:
        """Return the graph as it is now, with these weights in 4 bits."""
        added = tuple(State(name, name, Role.PARAMETER, name) for name in self._adapters)
        frozen = [state.input for state in self._graph.states if state.role is Role.PARAMETER]
        metadata = {**self._graph.metadata, FROZEN: json.dumps(frozen)}
        if quantised:
            metadata[STORED] = json.dumps(dict.fromkeys(sorted(quantised), NF4_BYTES))
        return replace(
            self._graph,
            values=self.tape.values,
            constants=self.tape.constants,
            states=(*self._graph.states, *added),
            ops=tuple(self.tape.ops),
            metadata=metadata,
        )

    def write(self, op: Op) -> None:
        """Write a product with its adapter."""
        tape, lora, (x, weight, *_), (y,) = self.tape, self._lora, op.inputs, op.outputs
        dtype, rank = tape.dtype(y), lora.rank
        experts = tape.shape(weight)[:-2] if tape.values[weight].is_float else ()  # packed ones have dims of their own
        a, b = adapter_names(weight)
        if lora.shared:
            a = self._shared.setdefault(x, a)
        for name, shape in ((a, (tape.shape(x)[-1], rank)), (b, (rank, tape.shape(y)[-1]))):
            if name not in self._adapters:
                tape.define(name, (*experts, *shape), dtype)
                self._adapters[name] = None
        plain = tape.define(f"{y}.base", tape.shape(y), dtype)
        tape.ops.append(replace(op, outputs=(plain,)))
        tape.write_for(op.phase, op.block, stem=f"{op.name}.lora")
        kind, attrs = (GROUPED, dict(op.attrs)) if op.kind == GROUPED else ("MatMul", {})
        if (a, x) not in self._halves:
            self._halves[a, x] = tape.emit(kind, (x, a), (*tape.shape(y)[:-1], rank), dtype, **attrs)
        change = tape.emit(kind, (self._halves[a, x], b), tape.shape(y), dtype, **attrs)
        tape.append("Add", (plain, tape.times(change, lora.scale)), (y,), f"{op.name}.lora.sum")


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of A and B of a weight.

    >>> adapter_names("layers.0.attn.q.weight")
    ('layers.0.attn.q.lora_A.weight', 'layers.0.attn.q.lora_B.weight')
    >>> adapter_names("h.0.attn.c_attn.weight.q")
    ('h.0.attn.c_attn.lora_A.weight', 'h.0.attn.c_attn.lora_B.weight.q')
    """
    module, dot, part = weight.partition(".weight")
    if not dot or (part and not part.startswith(".")):
        return f"{weight}.{_A}", f"{weight}.{_B}"
    turned = ".T" if part.endswith(".T") else ""
    return f"{module}.{_A}.weight{turned}", f"{module}.{_B}.weight{part}"


def _quantised(graph: Graph, products: Mapping[str, str], layers: Set[str]) -> frozenset[str]:
    """Return the weights of layers that are stored in 4 bits: matrices of floats that products alone read."""
    values = graph.values
    found = {name for name in layers if len(values[name].shape) == 2 and values[name].is_float}
    for op in graph.ops:
        found.difference_update(name for name in op.inputs if name != products.get(op.name))
    return frozenset(found)


def _targeted(weights: Collection[str], layers: Set[str], targets: Sequence[str]) -> frozenset[str]:
    """Return the weights that get an adapter.

    Raises:
        JobError: If a target is none of `GROUPS` and in no name, or a group has no weight.
    """
    attention = {name for name in layers if any(word in name.lower() for word in _ATTENTION)}
    groups = {"all": layers, "attention": attention, "mlp": layers - attention}
    found: set[str] = set()
    for target in targets:
        wanted = f".{target}."
        own = groups[target] if target in groups else {name for name in weights if wanted in f".{name}."}
        if not own:
            modules = dict.fromkeys(_module(name) for name in weights)
            known = ", ".join([*GROUPS, *list(modules)[:_SHOWN]])
            raise JobError(
                f"LoRA target {target!r} is in the name of no weight of a product",
                hint=f"targets takes {known}" + (", ..." if len(modules) > _SHOWN else ""),
            )
        found |= own
    return frozenset(found)


def _matching(weights: Collection[str], pattern: str) -> frozenset[str]:
    """Return the weights whose modules have names that a regular expression matches as a whole.

    Raises:
        JobError: If there are none.
    """
    modules = {name: name.partition(".weight")[0] for name in weights}
    found = frozenset(name for name, module in modules.items() if re.fullmatch(pattern, module))
    if not found:
        known = list(dict.fromkeys(modules.values()))
        raise JobError(
            f"LoRA pattern {pattern!r} matches the whole name of no module with a product",
            hint=f"modules are {', '.join(known[:_SHOWN])}" + (", ..." if len(known) > _SHOWN else ""),
        )
    return found


def _module(weight: str) -> str:
    """Return the last word of the name of the module that has a weight.

    >>> _module("layers.0.attn.q.weight"), _module("h.0.mlp.c_fc.weight.T"), _module("w")
    ('q', 'c_fc', 'w')
    """
    return weight.partition(".weight")[0].rpartition(".")[2]
