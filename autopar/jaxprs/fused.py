"""Softmax, normalisations, activations and products in the equations of a program, each made one ONNX op.

JAX has primitives for none of them, and the planner prices each as one kernel. A rule looks at the equation whose
result is that of the op, and follows operands upwards; what it replaces goes if nobody else reads it.
"""

from collections.abc import Callable, Iterator, Mapping
from math import isclose, pi, sqrt
from typing import Any

import numpy as np

from autopar.jaxprs.equations import Equation, Program, Value, constant
from autopar.jaxprs.positions import Full, content

_TOLERANCE = 1e-3
"""Of constants of an activation: they may be rounded to bfloat16."""


class Facts:
    """Who defines the values of a program, and how often each is read.

    Attributes:
        made: Equation that defines each value.
        uses: Equations that read each value.
    """

    def __init__(self, program: Program) -> None:
        self.made: dict[Value, Equation] = {out: each for each in program.equations for out in each.outputs}
        self.uses: dict[Value, list[Equation]] = {}
        for each in program.equations:
            for value in dict.fromkeys(each.inputs):
                self.uses.setdefault(value, []).append(each)
        self._results = set(program.outputs)

    def operands(self, value: Value, *kinds: str) -> tuple[Value, ...] | None:
        """Return the operands of the equation that makes a value, None if it is of none of the kinds."""
        equation = self.made.get(value)
        return equation.inputs if equation is not None and equation.kind in kinds else None

    def reader(self, value: Value) -> Equation | None:
        """Return the only equation that reads a value, None if there is none or are more."""
        readers = self.uses.get(value, [])
        return readers[0] if len(readers) == 1 and value not in self._results else None

    def scalar(self, value: Value) -> float | None:
        """Return the number that all elements of a value are; None if it is not known to be one."""
        found = content(value, self.made)
        return found.number if isinstance(found, Full) else None

    def either(self, value: Value, kind: str) -> Iterator[tuple[Value, Value]]:
        """Yield the operands of a commutative equation in both orders; nothing if the value is made otherwise."""
        operands = self.operands(value, kind)
        if operands is not None:
            yield operands[0], operands[1]
            yield operands[1], operands[0]

    def times(self, value: Value, factor: float) -> Value | None:
        """Return what a value is `factor` times of."""
        return next((x for x, by in self.either(value, "mul") if _close(self.scalar(by), factor)), None)

    def row(self, value: Value) -> Value:
        """Return a value per row of a tensor as it was before it got its last dim back."""
        while True:
            equation = self.made.get(value)
            if equation is None or not equation.inputs or not _adds_last_dim(equation):
                return value
            value = equation.inputs[0]

    def reduced(self, value: Value, kind: str) -> Value | None:
        """Return what a value per row reduces over its last dim; None if it does not."""
        equation = self.made.get(self.row(value))
        if equation is None or equation.kind != kind:
            return None
        (x,) = equation.inputs
        return x if [int(axis) for axis in equation.params["axes"]] == [len(x.shape) - 1] else None

    def mean(self, value: Value) -> Value | None:
        """Return what a value per row is the mean of."""
        value = self.row(value)
        quotient, product = self.operands(value, "div"), self.either(value, "mul")
        found = []
        if quotient is not None:
            found.append((quotient[0], self.scalar(quotient[1])))
        for total, by in product:
            number = self.scalar(by)
            found.append((total, 1 / number if number else None))
        for total, count in found:
            x = self.reduced(total, "reduce_sum")
            if x is not None and _close(count, x.shape[-1]):
                return x
        return None

    def square(self, value: Value) -> Value | None:
        """Return what a value is the square of."""
        equation = self.made.get(value)
        if equation is None:
            return None
        power = equation.kind == "integer_pow" and equation.params["y"] == 2
        product = equation.kind == "mul" and equation.inputs[0] is equation.inputs[1]
        return equation.inputs[0] if power or product or equation.kind == "square" else None

    def centered(self, value: Value) -> Value | None:
        """Return what a value is, its mean over the last dim subtracted."""
        operands = self.operands(value, "sub")
        return operands[0] if operands is not None and self.mean(operands[1]) is operands[0] else None


def _close(number: float | None, to: float) -> bool:
    return number is not None and isclose(number, to, rel_tol=_TOLERANCE)


def _adds_last_dim(equation: Equation) -> bool:
    source, target = equation.inputs[0].shape, equation.output.shape if len(equation.outputs) == 1 else ()
    if equation.kind == "reshape":
        return target == (*source, 1)
    if equation.kind != "broadcast_in_dim":
        return False
    dims = [int(dim) for dim in equation.params["broadcast_dimensions"]]
    if dims != list(range(len(source))) or len(target) - len(source) not in (0, 1):
        return False
    return source == target[: len(source)] or (len(source) == len(target) and source == (*target[:-1], 1))


Replaced = list[Equation]
"""What stands for an equation: the last has its results."""


def fuse(program: Program) -> None:
    """Replace equations by ONNX ops where they compute one."""
    from autopar.jaxprs.attention import attention

    passes: tuple[Mapping[str, Rule], ...] = (
        _SIMPLE, _NORMS, {"add": _biased, "max": _of_max}, {"dot_general": attention}, {"transpose": _product},
    )  # fmt: skip
    for rules in passes:
        facts = Facts(program)
        done: set[Equation] = set()
        found: dict[Equation, Replaced] = {}
        for equation in reversed(program.equations):
            rule = rules.get(equation.kind)
            if rule is None or equation in done:
                continue
            replaced = rule(equation, facts, done)
            if replaced is not None:
                found[equation] = replaced
        program.equations = [new for each in program.equations for new in found.get(each, [each])]
        _without_copies(program)
        program.without_unused()


def _without_copies(program: Program) -> None:
    source: dict[Value, Value] = {}
    kept: list[Equation] = []
    for each in program.equations:
        inputs = tuple(source.get(value, value) for value in each.inputs)
        if each.kind == "Identity":
            source[each.output] = inputs[0]
        else:
            kept.append(Equation(each.kind, inputs, each.outputs, each.params, each.scope))
    program.equations = kept
    program.outputs = [source.get(value, value) for value in program.outputs]


def _same(equation: Equation, x: Value) -> Replaced:
    return [Equation("Identity", (x,), equation.outputs, {}, equation.scope)]


def _op(kind: str, equation: Equation, *inputs: Value, **attrs: Any) -> Replaced:
    return [Equation(kind, inputs, equation.outputs, attrs, equation.scope)]


def _of_mul(equation: Equation, facts: Facts, done: set[Equation]) -> Replaced | None:
    """Find Swish and both forms of GELU, as `jax.nn` has them."""
    y = equation.output
    for x, factor in facts.either(y, "mul"):
        if facts.operands(factor, "logistic") == (x,):
            return _op("Swish", equation, x)
        one_plus = facts.times(factor, 0.5)
        for tanh, one in facts.either(one_plus, "add") if one_plus is not None else ():
            inner = facts.operands(tanh, "tanh")
            if _close(facts.scalar(one), 1) and inner is not None and _is_gelu_argument(inner[0], x, facts):
                return _op("Gelu", equation, x, approximate="tanh")
        erfc = facts.operands(factor, "erfc")
        of = facts.times(x, 0.5)
        if erfc is not None and of is not None:
            inverted = facts.times(erfc[0], sqrt(0.5))
            if inverted is not None and facts.operands(inverted, "neg") == (of,):
                return _op("Gelu", equation, of, approximate="none")
    return None


def _is_gelu_argument(value: Value, x: Value, facts: Facts) -> bool:
    """Whether a value is sqrt(2 / pi) (x + 0.044715 x^3)."""
    inner = facts.times(value, sqrt(2 / pi))
    for term, cubic in facts.either(inner, "add") if inner is not None else ():
        cube = facts.times(cubic, 0.044715)
        equation = facts.made.get(cube) if cube is not None else None
        if term is x and equation is not None and equation.kind == "integer_pow" and equation.params["y"] == 3:
            return equation.inputs[0] is x
    return False


def _of_div(equation: Equation, facts: Facts, done: set[Equation]) -> Replaced | None:
    """Find a softmax over the last dim; what is subtracted from a whole row first, its maximum, changes no number."""
    exponential, total = equation.inputs
    inner = facts.operands(exponential, "exp")
    if inner is None or facts.reduced(total, "reduce_sum") is not exponential:
        return None
    shifted = facts.operands(inner[0], "sub")
    x = shifted[0] if shifted is not None and _is_per_row(shifted[1], facts) else inner[0]
    return _op("Softmax", equation, x, axis=-1) if x.shape == equation.output.shape else None


def _is_per_row(value: Value, facts: Facts) -> bool:
    """Whether all entries along the last dim of a value are equal."""
    return value.shape[-1:] == (1,) or facts.row(value) is not value


def _of_max(equation: Equation, facts: Facts, done: set[Equation]) -> Replaced | None:
    for x, low in facts.either(equation.output, "max"):
        if facts.scalar(low) == 0 and x.shape == equation.output.shape and "float" in x.dtype:
            return _op("Relu", equation, x)
    return None


def _of_sum(equation: Equation, facts: Facts, done: set[Equation]) -> Replaced | None:
    x, y = equation.inputs
    if facts.scalar(y) == 0 and x.shape == equation.output.shape:
        return _same(equation, x)
    return None


def _of_select(equation: Equation, facts: Facts, done: set[Equation]) -> Replaced | None:
    """Drop choices that are known: among them the wrapping of negative indices, which ONNX's gathers do themselves."""
    condition, *cases = equation.inputs
    number = facts.scalar(condition)
    if number is not None and cases[int(number)].shape == equation.output.shape:
        return _same(equation, cases[int(number)])
    test = facts.operands(condition, "lt")
    if len(cases) == 2 and test is not None and test[0] is cases[0] and facts.scalar(test[1]) == 0:
        wrapped = facts.operands(cases[1], "add")
        readers = facts.uses.get(equation.output, [])
        if wrapped is not None and wrapped[0] is cases[0] and all(_is_index(each, equation, facts) for each in readers):
            return _same(equation, cases[0])
    return None


def _is_index(reader: Equation, made: Equation, facts: Facts) -> bool:
    """Whether an equation reads a value as the index of a gather, through changes of shape."""
    if reader.kind == "gather":
        return made.output not in reader.inputs[:1]
    if reader.kind in ("reshape", "broadcast_in_dim"):
        return all(_is_index(each, reader, facts) for each in facts.uses.get(reader.output, []))
    return False


def _normalized(equation: Equation, facts: Facts, done: set[Equation]) -> Replaced | None:
    """Find layer and RMS normalisations over the last dim, with scale and bias where they have them.

    The result is a product of x, or x less its mean, of the inverse root of its variance, and of a scale, in any order;
    a bias may be added.
    """
    factors: list[Value] = []
    inverse: tuple[Value, float] | None = None
    inner: list[Equation] = []
    stack = [equation.output]
    while stack:
        value = stack.pop()
        made = facts.made.get(facts.row(value))
        root = _inverse_root(made, facts)
        if root is not None and inverse is None:
            inverse = root
        elif made is not None and made.kind in ("mul", "div") and (made is equation or facts.reader(made.output)):
            inner.append(made)
            if made.kind == "mul":
                stack += made.inputs
                continue
            root = _root(facts.made.get(facts.row(made.inputs[1])), facts)
            if root is None or inverse is not None:
                factors.append(value)
                inner.pop()
                continue
            inverse = root
            stack.append(made.inputs[0])
        else:
            factors.append(value)
    if inverse is None:
        return None
    variance, epsilon = inverse
    for core in factors:
        kind, x = _kind(core, variance, facts)
        if x is None:
            continue
        others = [factor for factor in factors if factor is not core]
        scales = [factor for factor in others if facts.scalar(factor) is None and _vector(factor, facts) is not None]
        done.update(inner)
        return _normalization(equation, kind, x, epsilon, scales, others, facts)
    return None


def _normalization(
    equation: Equation, kind: str, x: Value, epsilon: float, scales: list[Value], others: list[Value], facts: Facts
) -> Replaced:
    scale = _vector(scales[0], facts) if len(scales) == 1 else None
    rest = [factor for factor in others if scale is None or factor is not scales[0]]
    if scale is None:
        scale = constant(np.ones(x.shape[-1:], np.float32))
    made: Replaced = []
    if scale.dtype != x.dtype:
        made.append(_cast(scale, x.dtype, equation.scope))
        scale = made[-1].output
    result = Value(x.shape, x.dtype)
    made.append(Equation(kind, (x, scale), (result,), {"axis": -1, "epsilon": epsilon}, equation.scope))
    for factor in rest:
        result = Value(np.broadcast_shapes(result.shape, factor.shape), x.dtype)
        made.append(Equation("mul", (made[-1].output, factor), (result,), {}, equation.scope))
    last = made[-1]
    made[-1] = Equation(last.kind, last.inputs, equation.outputs, last.params, last.scope)
    return made


def _cast(value: Value, dtype: str, scope: str) -> Equation:
    return Equation("convert_element_type", (value,), (Value(value.shape, dtype),), {}, scope)


def _inverse_root(made: Equation | None, facts: Facts) -> tuple[Value, float] | None:
    """Return variance and epsilon of an inverse root."""
    if made is not None and made.kind == "rsqrt":
        return _with_epsilon(made.inputs[0], facts)
    if made is not None and made.kind == "div" and facts.scalar(made.inputs[0]) == 1:
        return _root(facts.made.get(facts.row(made.inputs[1])), facts)
    return None


def _root(made: Equation | None, facts: Facts) -> tuple[Value, float] | None:
    return _with_epsilon(made.inputs[0], facts) if made is not None and made.kind == "sqrt" else None


def _with_epsilon(value: Value, facts: Facts) -> tuple[Value, float] | None:
    for variance, epsilon in facts.either(facts.row(value), "add"):
        number = facts.scalar(epsilon)
        if number is not None:
            return variance, number
    return None


def _kind(core: Value, variance: Value, facts: Facts) -> tuple[str, Value | None]:
    """Return the op whose unscaled result is `core` by the root of the variance, and what it is of."""
    variance = facts.row(variance)
    for positive, low in facts.either(variance, "max"):
        if facts.scalar(low) == 0:
            variance = facts.row(positive)
            break
    squares = facts.mean(variance)
    x = facts.centered(core)
    if squares is not None:
        of = facts.square(squares)
        if of is None:
            return "", None
        if x is not None and (of is core or facts.centered(of) is x):
            return "LayerNormalization", x
        return "RMSNormalization", core if of is core else None
    difference = facts.operands(variance, "sub")
    if x is None or difference is None:
        return "", None
    squares, mean = facts.mean(difference[0]), facts.square(facts.row(difference[1]))
    is_variance = squares is not None and facts.square(squares) is x and mean is not None and facts.mean(mean) is x
    return "LayerNormalization", x if is_variance else None


def _vector(value: Value, facts: Facts) -> Value | None:
    """Return the list of numbers, one per entry of the last dim, that a value repeats for all rows."""
    while len(value.shape) > 1:
        equation = facts.made.get(value)
        if equation is None or len(equation.inputs) != 1:
            return None
        source, target = equation.inputs[0].shape, equation.output.shape
        if equation.kind == "reshape" and target == (1,) * (len(target) - 1) + source[-1:] and len(source) == 1:
            value = equation.inputs[0]
        elif equation.kind == "broadcast_in_dim" and source and source[-1] == target[-1]:
            dims = [int(dim) for dim in equation.params["broadcast_dimensions"]]
            if dims[-1] != len(target) - 1:
                return None
            value = equation.inputs[0]
        else:
            return None
    return value if value.shape else None


def _biased(equation: Equation, facts: Facts, done: set[Equation]) -> Replaced | None:
    """Add the bias of a layer normalisation to it."""
    for normed, bias in facts.either(equation.output, "add"):
        made = facts.made.get(normed)
        reader = facts.reader(normed)
        vector = _vector(bias, facts)
        if made is None or reader is not equation or vector is None or vector.dtype != equation.output.dtype:
            continue
        if made.kind == "LayerNormalization" and len(made.inputs) == 2:
            return [Equation(made.kind, (*made.inputs, vector), equation.outputs, made.params, made.scope)]
    return None


def _product(equation: Equation, facts: Facts, done: set[Equation]) -> Replaced | None:
    """Let a product make its result in the order of dims that a transpose after it asks for."""
    made = facts.made.get(equation.inputs[0])
    if made is None or made.kind != "dot_general" or facts.reader(made.output) is not equation:
        return None
    params = {**made.params, "permutation": tuple(int(dim) for dim in equation.params["permutation"])}
    return [Equation(made.kind, made.inputs, equation.outputs, params, made.scope)]


Rule = Callable[[Equation, Facts, set[Equation]], Replaced | None]
_SIMPLE: Mapping[str, Rule] = {
    "add": _of_sum, "div": _of_div, "mul": _of_mul, "select_n": _of_select, "sub": _of_sum,
}  # fmt: skip
_NORMS: Mapping[str, Rule] = {"div": _normalized, "mul": _normalized}
