"""Names and expressions of the dims of data inputs, and which dim of an input is the batch.

Look here for how a symbolic dim gets a name (`named`), for the value of a dim that a file writes as an expression of
other dims, such as "4096-kv" or "past_sequence_length + 1" (`evaluate`), and for the choice of the batch dim
(`batch_axes`). A dim without a name in the file ("?") is called `INPUT.AXIS`.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from autopar.errors import ModelError

Dim = int | str
"""A size, or the name or expression of a dynamic dim."""

_BATCH_NAME = re.compile(r"n|b|bs|bsz|(.*[^a-z])?batch([ _.-]?(size|dim|axis))?([^a-z].*)?", re.IGNORECASE)
"""Names that exporters give to the batch dim, where it need not be the first."""

_TIME_NAME = re.compile(r"t|(.*[^a-z])?(seq|sequence|time|frames?|steps?|len|length)([^a-z].*)?", re.IGNORECASE)
"""Names that exporters give to the dim of time, which is no batch where it is the first."""

_LONGEST = 200
"""Characters of an expression; a longer text is a name."""

_LETTERS = re.compile(r"[^\W\d_]")
_NO_NAMES = frozenset({"None", "none", "unk", "unknown"})
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def named(dim: str, value: str, axis: int) -> str:
    """Return the name of a dynamic dim; one that is anonymous in the file gets a name of its own.

    >>> named("seq", "x", 1), named("?", "x", 1), named("", "x", 0)
    ('seq', 'x.1', 'x.0')
    """
    return dim if _LETTERS.search(dim) and dim not in _NO_NAMES else f"{value}.{axis}"


def variables(dim: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the dims an expression is computed from; () for a plain name.

    A name with a sign in it ("batch-size") is an expression only if all its parts are dims of the model.

    >>> variables("4096-kv", ["kv", "4096-kv"]), variables("batch-size", ["batch-size"])
    (('kv',), ())
    """
    tree = _tree(dim)
    if tree is None or isinstance(tree, ast.Name):
        return ()
    found = tuple(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))
    return found if set(found) <= set(names) else ()


def evaluate(dim: str, sizes: Mapping[str, int]) -> int:
    """Return the size an expression has for sizes of the dims in it.

    Raises:
        ModelError: If that is no positive number.

    >>> evaluate("4096-kv", {"kv": 96})
    4000
    """
    tree = _tree(dim)
    assert tree is not None, "only expressions are evaluated"

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return sizes[name]
            case ast.BinOp(left=left, op=op, right=right):
                divisor = value(right)
                if divisor == 0 and isinstance(op, ast.FloorDiv | ast.Div | ast.Mod):
                    raise ModelError(f"dim {dim!r} divides by 0 with {_given(dim, sizes)}")
                return _OPERATORS[type(op)](value(left), divisor)
        raise AssertionError("such expressions are not parsed")

    size = value(tree)
    if size < 1:
        raise ModelError(f"dim {dim!r} is {size} with {_given(dim, sizes)}", hint="set sizes with which it is positive")
    return size


def _given(dim: str, sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={sizes[name]}" for name in variables(dim, list(sizes)))


def _tree(dim: str) -> ast.expr | None:
    """Return an expression of names and whole numbers; None if the text is none."""
    if len(dim) > _LONGEST:
        return None
    try:
        tree = ast.parse(dim.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        fits = isinstance(node, ast.Name | ast.BinOp | ast.expr_context | ast.operator)
        number = isinstance(node, ast.Constant) and type(node.value) is int
        if not (fits or number) or (isinstance(node, ast.operator) and type(node) not in _OPERATORS):
            return None
    return tree


def batch_axes(shapes: Sequence[Sequence[Dim]]) -> list[int | None]:
    """Return the batch dim of each input, None for one without.

    If a dim is named so that it is the batch, inputs have it there, be it the first dim or not. An input that names no
    such dim has it first if that dim is dynamic and not named as time, unless the batch is never first. If nothing
    first is dynamic, a model is taken as exported for a fixed batch: the first fixed size at dim 0.

    >>> batch_axes([["seq", "batch", 64], [2, "batch", 64], [5, 5]])
    [1, 1, None]
    >>> batch_axes([["seq", 64], [1, 64]])
    [None, None]
    """
    axes = [next((axis for axis, dim in enumerate(shape) if _is_batch(dim)), None) for shape in shapes]
    if any(axis is not None and axis > 0 for axis in axes) and 0 not in axes:
        return axes
    axes = [
        0 if axis is None and shape and isinstance(shape[0], str) and not _TIME_NAME.fullmatch(shape[0]) else axis
        for axis, shape in zip(axes, shapes, strict=True)
    ]
    if any(axis is not None for axis in axes) or any(shape and isinstance(shape[0], str) for shape in shapes):
        return axes
    exported = next((shape[0] for shape in shapes if shape), None)
    return [0 if shape and shape[0] == exported else None for shape in shapes]


def _is_batch(dim: Dim) -> bool:
    return isinstance(dim, str) and _BATCH_NAME.fullmatch(dim) is not None
