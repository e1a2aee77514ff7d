"""What values hold that are made of positions alone: causal masks, found without computing them.

A mask of a sequence of 32,768 tokens has 1e9 elements. The rules below know four contents and follow them through the
primitives that masks are written with; every other value has none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.jaxprs.equations import Equation, Value


@dataclass(frozen=True, slots=True)
class Full:
    """All elements are `number`."""

    number: float


@dataclass(frozen=True, slots=True)
class Position:
    """Elements are their index along `dim`, plus `offset`."""

    dim: int
    offset: float


@dataclass(frozen=True, slots=True)
class Causal:
    """1 where the index along dim `query` is at least the index along dim `key`, else 0."""

    query: int
    key: int


Content = Full | Position | Causal


def content(value: Value, made: Mapping[Value, Equation]) -> Content | None:
    """Return what a value holds, None if that is not known.

    Args:
        value: The value.
        made: Equation that defines each value.
    """
    if value.data is not None:
        return Full(float(value.data)) if value.data.size == 1 and not value.shape else None
    equation = made.get(value)
    rule = _RULES.get(equation.kind) if equation is not None else None
    if equation is None or rule is None:
        return None
    return rule(equation, [content(operand, made) for operand in equation.inputs])


def unit_dims_moved(source: tuple[int, ...], target: tuple[int, ...]) -> dict[int, int] | None:
    """Return where dims other than 1 go if a reshape only adds or drops dims of size 1; None if it does more."""
    before = [dim for dim, size in enumerate(source) if size != 1]
    after = [dim for dim, size in enumerate(target) if size != 1]
    if [source[dim] for dim in before] != [target[dim] for dim in after]:
        return None
    return dict(zip(before, after, strict=True))


def _moved(found: Content | None, where: Mapping[int, int]) -> Content | None:
    match found:
        case Position(dim, offset) if dim in where:
            return Position(where[dim], offset)
        case Causal(query, key) if query in where and key in where:
            return Causal(where[query], where[key])
        case Full():
            return found
    return None


def _iota(equation: Equation, operands: list[Content | None]) -> Content | None:
    return Position(equation.params["dimension"], 0)


def _reshape(equation: Equation, operands: list[Content | None]) -> Content | None:
    where = unit_dims_moved(equation.inputs[0].shape, equation.output.shape)
    return _moved(operands[0], where) if where is not None else None


def _broadcast(equation: Equation, operands: list[Content | None]) -> Content | None:
    source, target = equation.inputs[0].shape, equation.output.shape
    dims = enumerate(equation.params["broadcast_dimensions"])
    return _moved(operands[0], {dim: int(to) for dim, to in dims if source[dim] == target[to]})


def _transpose(equation: Equation, operands: list[Content | None]) -> Content | None:
    return _moved(operands[0], {dim: to for to, dim in enumerate(equation.params["permutation"])})


def _same(equation: Equation, operands: list[Content | None]) -> Content | None:
    match operands:
        case [Full(number)] if equation.output.dtype == "bool":
            return Full(float(number != 0))
        case [Position()] if equation.output.dtype == "bool":
            return None
    return operands[0]


def _add(equation: Equation, operands: list[Content | None]) -> Content | None:
    sign = -1 if equation.kind == "sub" else 1
    match operands:
        case [Position(dim, offset), Full(number)]:
            return Position(dim, offset + sign * number)
        case [Full(number), Position(dim, offset)] if sign == 1:
            return Position(dim, offset + number)
        case [Full(a), Full(b)]:
            return Full(a + sign * b)
    return None


def _compare(equation: Equation, operands: list[Content | None]) -> Content | None:
    kind, (a, b) = equation.kind, operands
    if kind in ("le", "lt"):  # a <= b is b >= a
        a, b = b, a
    strict = kind in ("lt", "gt")
    match a, b:
        case Position(query, ahead), Position(key, behind) if query != key and ahead == behind + strict:
            return Causal(query, key)
        case Full(number), Position(_, least) if least > number or (strict and least == number):
            return Full(0)
        case Position(_, least), Full(number) if least > number or (not strict and least == number):
            return Full(1)
        case Causal(), Full(number) if 0 <= number < 1 if strict else 0 < number <= 1:
            return a
    return None


def _equal(equation: Equation, operands: list[Content | None]) -> Content | None:
    number = 0.0 if equation.kind == "ne" else 1.0
    match operands:
        case [Causal() as mask, Full(other)] | [Full(other), Causal() as mask] if other == number:
            return mask
    return None


def _both(equation: Equation, operands: list[Content | None]) -> Content | None:
    neutral = 0.0 if equation.kind == "or" else 1.0
    match operands:
        case [Full(number), other] | [other, Full(number)] if number == neutral:
            return other
        case [Causal() as one, Causal() as other] if one == other:
            return one
    return None


def _select(equation: Equation, operands: list[Content | None]) -> Content | None:
    match operands:
        case [Full(number), *cases] if int(number) < len(cases):
            return cases[int(number)]
        case [Causal() as mask, Full(0), Full(1)]:
            return mask
    return None


_RULES: Mapping[str, Callable[[Equation, list[Content | None]], Content | None]] = {
    "add": _add,
    "and": _both,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _same,
    "eq": _equal,
    "ge": _compare,
    "gt": _compare,
    "iota": _iota,
    "le": _compare,
    "lt": _compare,
    "mul": _both,
    "ne": _equal,
    "or": _both,
    "reshape": _reshape,
    "select_n": _select,
    "squeeze": _reshape,
    "sub": _add,
    "transpose": _transpose,
}
