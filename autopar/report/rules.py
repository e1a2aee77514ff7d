"""Discovered sharding rules as text and as JSON data: each distinct rule once, with the ops that follow it."""

from typing import TYPE_CHECKING, Any

from autopar.errors import JobError
from autopar.report.text import format_table

if TYPE_CHECKING:
    from autopar.discover.rules import Rule, Rules


def format_rules(rules: "Rules", kind: str | None = None) -> str:
    """Return the rules in an einsum-like form, `autopar.discover.rules.format_rule`'s.

    Args:
        rules: What discovery found.
        kind: Kind of op to show; None shows all.

    Raises:
        JobError: If no op is of that kind.
    """
    from autopar.discover.rules import format_rule

    rows = [(rule.kind, str(len(ops)), format_rule(rule)) for rule, ops in select_rules(rules, kind)]
    lines = [
        *format_table(("op", "ops", "rule"), rows),
        "",
        "A letter marks the dims that one strategy shards, '.' a dim that cannot be",
        "sharded, '_' an input that is no tensor.",
    ]
    return "\n".join(lines) + "\n"


def rules_to_json(rules: "Rules", kind: str | None = None) -> list[dict[str, Any]]:
    """Return the rules as JSON data, each with the names of its ops.

    Raises:
        JobError: If no op is of that kind.
    """
    from autopar.discover.rules import rule_to_json

    return [{**rule_to_json(rule), "ops": ops} for rule, ops in select_rules(rules, kind)]


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
