"""Software stacks for reading."""

from collections.abc import Mapping

from autopar.cost.stack import SCALARS, Stack, format_scalar
from autopar.report.text import WIDTH, format_table, wrap

_DISPATCH: Mapping[str, str] = {"all-to-all": "once per expert", "per-node": "once per device"}
"""How often a token is sent, by dispatcher."""
_EXPERTS: Mapping[str, str] = {"each": "one each", "grouped": "one for all", "fused": "one for all, fused"}
"""Kernels of the products of a device's experts."""


def format_stacks(stacks: Mapping[str, Stack]) -> str:
    """Return the choices, scalars and fits of stacks as text: a table, then what the scalars mean."""
    overview = format_table(
        ("name", "attention", "fusion", "clusters", "fit"),
        [
            (name, stack.attention, stack.fusion, ", ".join(stack.clusters) or "any", _fit(stack))
            for name, stack in stacks.items()
        ],
    )
    lines = overview
    for name, stack in stacks.items():
        hidden = ", hidden behind another microbatch" if stack.hides_dispatch else ""
        hidden = ", beside shared experts" if stack.covers_rows else hidden
        told = f"{name}: a token is sent {_DISPATCH[stack.dispatch]}{hidden}; CUDA graphs: {stack.graphs}"
        told += f"; kernels of experts: {_EXPERTS[stack.experts]}"
        told += f"; context parallelism: {stack.context}"
        told += "; tensor parallelism hidden behind products" if stack.hides_tp else ""
        told += "; sharded parameters gathered one by one" if stack.gathers == "parameter" else ""
        told += (
            "; selective recompute keeps attention and every other product" if stack.selective == "alternate" else ""
        )
        lines += ["", *wrap(told, WIDTH, rest="  ")]
        if stack.scalars:
            values = ", ".join(f"{scalar} {format_scalar(scalar, value)}" for scalar, value in stack.scalars)
            lines += wrap(values, WIDTH, "  ", "  ")
            if stack.at_bounds:
                lines += [f"  on a bound: {', '.join(stack.at_bounds)}"]
    rows = [
        (
            name,
            format_scalar(name, scalar.default),
            format_scalar(name, scalar.low),
            format_scalar(name, scalar.high),
            scalar.meaning,
        )
        for name, scalar in SCALARS.items()
    ]
    lines += ["", *format_table(("scalar", "default", "from", "to", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def _fit(stack: Stack) -> str:
    fit = stack.fit
    if fit is None:
        return "not fitted"
    unseen = "" if fit.held_out is None else f", {100 * fit.held_out:.1f} % unseen"
    return f"{100 * fit.error:.1f} % on {fit.rows} rows{unseen}, {fit.date}"
