"""Discovered sharding rules as text and as JSON data: each distinct rule once, with the ops that follow it."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from autopar.errors import JobError
from autopar.report.text import format_entries, wrap
from autopar.sharding import Partial
from autopar.units import format_seconds

if TYPE_CHECKING:
    from autopar.discover import Notation, Rule, Rules, Strategy

WIDTH = 100
_LEGEND = (
    ("[a,.]", "", "a letter is a strategy: all dims that bear it are sharded together; '.' cannot be sharded"),
    ("a/3", r"\w/\d", "sharded in 3 chunks, each of them over all devices (block-cyclic)"),
    ("a|b", r"\w\|\w", "two strategies shard this dim, each together with other dims"),
    ("_", r"\b_\b", "an input that is no tensor"),
    ("#1", r"#\d", "input 1, counted from 0"),
    (
        "a: sum",
        r"\w: (sum|mean|max|min|prod|logs)",
        "with a sharded, outputs without an a are terms of a sum (or max, ...)",
    ),
    ("partial", "partial", "an input that has to be given as terms of a sum (or max, min, ...)"),
    ("scales", "scales", "numbers of the op to be divided by the number of devices"),
    (
        "halo",
        "halo",
        "+1+1: rows of its neighbours a device needs before and after its own; 0 or lowest at the ends",
    ),
    ("sets", "sets", "numbers of the op that are others on a device"),
    ("runs", r"runs \S+ from", "what a device runs instead of the op, told the position of its first row"),
    ("terms", "terms", "P,R -> P: terms of a sum, given as input 0, make terms of the output; R is replicated"),
    ("(max)", r"-> P.* \(", "the same holds for terms of that reduction; if sum is not named, not for sums"),
    ("uneven", "uneven", "the strategies that also hold where devices have blocks of different sizes"),
    ("cyclic", "cyclic", "the strategies that also hold where all their dims are sharded block-cyclic"),
    (
        "found",
        "found|cached",
        "each strategy gave the result of the whole op with 2 devices on the first shapes, and "
        "with other data and 3 devices (2 where 3 does not divide) on the second",
    ),
)
"""Label, pattern of what it explains, explanation; only what is there is explained."""


def format_rules(rules: "Rules", kind: str | None = None) -> str:
    """Return the rules in an einsum-like form (`autopar.discover.notation`), with how each was found.

    Args:
        rules: What discovery found.
        kind: Kind of op to show; None shows all.

    Raises:
        JobError: If no op is of that kind.
    """
    lines: list[str] = []
    for rule, ops in select_rules(rules, kind):
        lines += [*_entry(rule, ops, rule.signature in rules.executed), ""]
    shown = "\n".join(lines)
    legend = [(label, meaning) for label, pattern, meaning in _LEGEND if re.search(pattern, shown)]
    lines += [*format_entries(legend, WIDTH), "", *wrap(_summary(rules), WIDTH)]
    return "\n".join(lines) + "\n"


def _entry(rule: "Rule", ops: Sequence[str], executed: bool) -> list[str]:
    """Return the lines about one rule."""
    from autopar.discover import actions, notate

    notation = notate(rule)
    notes = [f"{name}: {', '.join(done)}" for name, strategy in notation.letters if (done := actions(strategy))]
    spec = str(notation) if rule.input_ranks or rule.output_ranks else "no tensors"
    entries = [
        ("rule", "; ".join([spec, *notes])),
        ("terms", _terms(notation.others)),
        ("also", "; ".join(_also(notation))),
        ("with", rule.settings),
        ("found" if executed else "cached", _how(rule)),
        ("note", rule.reason),
    ]
    count = "1 op," if len(ops) == 1 else f"{len(ops)} ops, the first"
    shown = [(f"  {label:6}", text) for label, text in entries if text]
    return [f"{rule.kind}: {count} {ops[0]}", *format_entries(shown, WIDTH)]


def _terms(strategies: "Sequence[Strategy]") -> str:
    """Return the strategies on terms; those that are alike but for the reduction are one."""
    reductions: dict[str, list[str]] = {}
    for strategy in strategies:
        placed = (*strategy.inputs, *strategy.outputs)
        found = list(dict.fromkeys(placement.reduce for placement in placed if isinstance(placement, Partial)))
        text = str(strategy)
        if len(found) == 1:
            text = text.replace(f"P({found[0]})", "P")
        reductions.setdefault(text, []).extend(found if len(found) == 1 else [])
    return "; ".join(
        text if found in ([], ["sum"]) else f"{text} ({', '.join(found)})" for text, found in reductions.items()
    )


def _also(notation: "Notation") -> "Iterator[str]":
    """Iterate over other kinds of shards and the letters that allow them."""
    for what, chosen in (
        ("uneven", [name for name, strategy in notation.letters if strategy.uneven]),
        ("cyclic", [name for name, strategy in notation.letters if strategy.cyclic]),
    ):
        if chosen:
            yield f"{what} {'all' if len(chosen) == len(notation.letters) else ', '.join(chosen)}"


def _how(rule: "Rule") -> str:
    """Return what it took to find a rule."""
    runs = f"{rule.num_executions} runs in {format_seconds(rule.seconds)}"
    return " and ".join([f"{runs} on {rule.shapes[0]}", *rule.shapes[1:]]) if rule.shapes else runs


def _summary(rules: "Rules") -> str:
    found = f"{len(rules)} distinct ops of {len(rules.by_op)}"
    if not rules.executed:
        return f"{found}; all from the cache, nothing was run"
    executed = f"{len(rules.executed)} found by {rules.num_executions} runs in {format_seconds(rules.seconds)}"
    return f"{found}; {executed}, {rules.num_cached} from the cache"


def rules_to_json(rules: "Rules", kind: str | None = None) -> list[dict[str, Any]]:
    """Return the rules as JSON data, each with its one-line form, the names of its ops, and where it came from.

    Raises:
        JobError: If no op is of that kind.
    """
    from autopar.discover import format_rule
    from autopar.discover.rules import rule_to_json

    return [
        {
            **rule_to_json(rule),
            "rule": format_rule(rule),
            "source": "executed" if rule.signature in rules.executed else "cache",
            "ops": ops,
        }
        for rule, ops in select_rules(rules, kind)
    ]


def select_rules(rules: "Rules", kind: str | None) -> "list[tuple[Rule, list[str]]]":
    """Return the distinct rules of a kind in order of first use, each with the names of the ops that follow it.

    Raises:
        JobError: If no op is of that kind.
    """
    ops: dict[str, list[str]] = {}
    for name, rule in rules.by_op.items():
        ops.setdefault(rule.signature, []).append(name)
    selected = [(rule, ops[rule.signature]) for rule in rules if kind in {None, rule.kind}]
    if not selected:
        kinds = sorted({rule.kind for rule in rules})
        raise JobError(f"the model has no op of kind {kind!r}", hint=f"it has {', '.join(kinds)}")
    return selected
