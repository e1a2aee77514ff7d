"""Plans, timelines and rules as text, in 80 columns and without colour, so that it survives a log file."""

from autopar.report.answer import format_answer, next_commands
from autopar.report.difference import format_difference
from autopar.report.explain import format_explain
from autopar.report.rules import format_rules, rules_to_json
from autopar.report.summary import format_report
from autopar.report.timeline import format_flat, format_path, format_timeline

__all__ = [
    "format_answer",
    "format_difference",
    "format_explain",
    "format_flat",
    "format_path",
    "format_report",
    "format_rules",
    "format_timeline",
    "next_commands",
    "rules_to_json",
]
