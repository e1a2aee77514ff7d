"""Rules in an einsum-like notation.

Each letter is a strategy that shards the dims it stands on; `b/3` shards them block-cyclic in 3 chunks, `.` is a dim
that cannot be sharded, `b|c` one with alternatives, `_` an input that is no tensor. What a letter does besides, and the
strategies that shard nothing but take terms of a reduction, are listed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product
from string import ascii_lowercase

from autopar.discover.rules import Rule, Strategy
from autopar.sharding import Partial, Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class Notation:
    """A rule, taken apart for printing.

    Attributes:
        inputs: Dims of each input, such as "[a,b]".
        outputs: The same of each output.
        letters: The strategies that shard something, with their letters, in order of appearance.
        others: The strategies that shard nothing, but for the one that replicates.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    letters: tuple[tuple[str, Strategy], ...]
    others: tuple[Strategy, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.inputs)} -> {', '.join(self.outputs)}"


def notate(rule: Rule) -> Notation:
    """Return a rule in the einsum-like notation.

    >>> from autopar.sharding import parse_placement
    >>> texts = ("R R R", "R S(1) S(1)", "S(1) S(0) P", "S(0) R S(0)", "P R P")
    >>> triples = [tuple(map(parse_placement, text.split())) for text in texts]
    >>> found = tuple(Strategy(placements[:2], placements[2:]) for placements in triples)
    >>> notation = notate(Rule("MatMul", found, "", (2, 2), (2,), 0))
    >>> print(notation, *(strategy for _, strategy in notation.letters), *notation.others, sep="; ")
    [a,b], [b,c] -> [a,c]; S(0),R -> S(0); S(1),S(0) -> P; R,S(1) -> S(1); P,R -> P
    """
    sharding = [s for s in rule.strategies if any(isinstance(p, Shard) for p in (*s.inputs, *s.outputs))]
    letters = tuple(zip(_names(), sorted(sharding, key=_appearance), strict=False))
    inputs = [[s.inputs[index] for _, s in letters] for index in range(len(rule.input_ranks))]
    outputs = [[s.outputs[index] for _, s in letters] for index in range(len(rule.output_ranks))]
    names = [name for name, _ in letters]
    return Notation(
        tuple(_dims(rank, names, placed) for rank, placed in zip(rule.input_ranks, inputs, strict=True)),
        tuple(_dims(rank, names, placed) for rank, placed in zip(rule.output_ranks, outputs, strict=True)),
        letters,
        tuple(s for s in rule.strategies if s not in sharding and not s.is_replicate),
    )


def _appearance(strategy: Strategy) -> tuple[tuple[int, int], ...]:
    """Return where a strategy's letter stands, so that letters appear in order of the alphabet."""
    placed = enumerate((*strategy.inputs, *strategy.outputs))
    return tuple((index, placement.dim) for index, placement in placed if isinstance(placement, Shard))


def _names() -> Iterator[str]:
    """Iterate over a ... z, then aa, ab, ..."""
    return map("".join, chain.from_iterable(product(ascii_lowercase, repeat=length) for length in (1, 2, 3)))


def _dims(rank: int | None, names: list[str], placements: list[Placement]) -> str:
    """Return the dims of one tensor, given where each letter shards it."""
    if rank is None:
        return "_"
    dims: list[list[str]] = [[] for _ in range(rank)]
    for name, placement in zip(names, placements, strict=True):
        if isinstance(placement, Shard):
            dims[placement.dim].append(name if placement.chunks == 1 else f"{name}/{placement.chunks}")
    return "[" + ",".join("|".join(letters) or "." for letters in dims) + "]"


def actions(strategy: Strategy) -> list[str]:
    """Return what a strategy does besides sharding, in a few words each; `#1` is input 1, counted from 0."""
    reduced: dict[str, list[str]] = {}
    for index, placement in enumerate(strategy.outputs):
        if isinstance(placement, Partial):
            reduced.setdefault(placement.reduce, []).append(str(index))
    ambiguous = len(reduced) > 1 or any(isinstance(placement, Replicate) for placement in strategy.outputs)
    return [
        *(f"{reduce} of outputs {','.join(where)}" if ambiguous else reduce for reduce, where in reduced.items()),
        *(
            f"#{index} partial{'' if placement.reduce == 'sum' else f'({placement.reduce})'}"
            for index, placement in enumerate(strategy.inputs)
            if isinstance(placement, Partial)
        ),
        *([f"scales {', '.join(map(str, strategy.scaled))}"] if strategy.scaled else []),
        *(f"halo {halo}" for halo in strategy.halos),
        *([f"sets {', '.join(map(str, strategy.replaced))}"] if strategy.replaced else []),
        *([f"runs {strategy.local}"] if strategy.local else []),
    ]


def format_rule(rule: Rule) -> str:
    """Return a rule on one line: its notation, what each letter does besides, the other strategies, the reason.

    >>> whole, rows = Strategy((Replicate(),), (Replicate(),)), Strategy((Shard(0),), (Partial("max"),))
    >>> format_rule(Rule("ReduceMax", (whole, rows), "", (2,), (1,), 0))
    '[a,.]->[.]; a: max'
    """
    notation = notate(rule)
    notes = [f"{name}: {', '.join(done)}" for name, strategy in notation.letters if (done := actions(strategy))]
    notes += [str(strategy).replace(" -> ", "->") for strategy in notation.others]
    spec = f"{','.join(notation.inputs)}->{','.join(notation.outputs)}"
    return "; ".join([spec, *notes, *([rule.reason] if rule.reason else [])])
