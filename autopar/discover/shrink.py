"""Proxy ops: the same op on small shapes, so that discovery does not depend on the size of the model.

Every size of the op (dims, entries of shape-like constants, large integers in attributes) is replaced by a small proxy
size. What is allowed to change is found by trying: a ladder of replacements, from the freest (every distinct size gets
a proxy of its own) to the most faithful (ratios kept, sizes halved), each executed; the first on which the op runs and
whose output sizes are the proxies of the real ones is taken. Two proxies are made by the same replacement: an *even*
one, whose proxies are divisible by 2, and a *triple* one, whose proxies are divisible by 3.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.discover.rules import Scaled
from autopar.discover.sketch import Operand, Sketch
from autopar.errors import ExecutionError
from autopar.execute import Executor
from autopar.ir.graph import Attr

_MAX_ELEMENTS = 40_000
"""No proxy tensor is larger: a run stays below a few milliseconds."""
_LARGE_ATTR = 8
"""Integers of attributes above this may be sizes (heads, groups); below, they are axes, kernels, strides."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A small op with the rule of a large one.

    Attributes:
        sketch: The small op; its outputs are what it really computes.
        scalable: The numbers that stand for sizes, which a shard of the op may need divided.
    """

    sketch: Sketch
    scalable: tuple[Scaled, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """A rung of the ladder.

    Attributes:
        keep_small: Keep sizes up to 4 and sizes that occur in attributes (kernels, index depths).
        exact_ratio: Sizes that are up to this multiple of a smaller one stay the same multiple of its proxy.
        soft_ratio: Sizes that are up to this multiple become some multiple (twice or 3 times) of its proxy.
        halvings: Instead of all that, divide every size by 2 to this power where it can be.
    """

    keep_small: bool = False
    exact_ratio: int = 1
    soft_ratio: int = 1
    halvings: int = 0


_LADDER = (
    *(
        _Step(keep_small, exact, soft)
        for exact, soft in ((1, 1), (2, 4), (2, 128), (4, 4), (16, 16), (64, 64))
        for keep_small in (False, True)
    ),
    *(_Step(keep_small=True, halvings=halvings) for halvings in (9, 7, 5, 3, 1)),
)


@dataclass(frozen=True, slots=True)
class _Palette:
    """The proxy sizes: `start`, `start + step`, ...; half or a third of each has at least 2 elements."""

    start: int
    step: int


_EVEN, _TRIPLE = _Palette(4, 2), _Palette(6, 3)


def shrink(sketch: Sketch, executor: Executor) -> tuple[Proxy, Proxy] | None:
    """Return the even and the triple proxy of an op, or None if nothing on the ladder can be executed."""
    large = 2 * _MAX_ELEMENTS
    for strict in (True, False):
        for variant in _variants(sketch):
            even = _attempt(variant, _EVEN, executor, strict)
            if even is None:
                continue
            triple = _attempt(variant, _TRIPLE, executor, strict)
            if triple is not None:
                return even, triple
    if all(operand is None or prod(operand.shape) <= large for operand in sketch.inputs):
        raw = _execute(Proxy(sketch, ()), executor)
        if raw is not None:
            return raw, raw
    return None


@dataclass(frozen=True, slots=True)
class _Variant:
    """One choice of the ladder: how sizes are replaced, and which shape-like constants and attributes are."""

    sketch: Sketch
    step: _Step | None
    mapped: tuple[int, ...]
    attrs_mapped: bool


def _variants(sketch: Sketch) -> Iterator[_Variant]:
    """Iterate over the ladder; a step of None refines the dims of a reshape."""
    consts = tuple(i for i, operand in enumerate(sketch.inputs) if operand is not None and operand.is_shape_like)
    sizes = _sizes(sketch)
    mappable = [i for i in consts if any(abs(entry) in sizes for entry in _content(sketch, i))]
    choices = sorted(product((True, False), repeat=len(mappable)), key=lambda choice: -sum(choice))
    subsets = [tuple(i for i, chosen in zip(mappable, choice, strict=True) if chosen) for choice in choices]
    if _refinement(sketch) is not None:
        yield from (_Variant(sketch, None, subset, False) for subset in subsets)
    # Attributes last: a type code such as Cast's `to` looks like a size, but needs no change.
    attr_choices = (False, True) if _large_attrs(sketch) else (False,)
    for step in _LADDER:
        for subset in subsets:
            yield from (_Variant(sketch, step, subset, chosen) for chosen in attr_choices)
    if consts:  # the constants may be data, such as the rows a Gather picks
        free = sketch.with_inputs(
            tuple(
                Operand(operand.shape, operand.dtype) if i in consts and operand is not None else operand
                for i, operand in enumerate(sketch.inputs)
            )
        )
        yield from _variants(free)


def _content(sketch: Sketch, index: int) -> tuple[int, ...]:
    operand = sketch.inputs[index]
    assert operand is not None, "only called for constants"
    return tuple(int(entry) for entry in operand.content or ())


def _large_attrs(sketch: Sketch) -> tuple[int, ...]:
    """Return the integers of attributes that may be sizes."""
    return tuple(entry for _, value in sketch.attrs for entry in _ints(value) if entry > _LARGE_ATTR)


def _ints(value: Attr) -> tuple[int, ...]:
    entries = value if isinstance(value, tuple) else (value,)
    return tuple(entry for entry in entries if isinstance(entry, int))


def _sizes(sketch: Sketch) -> set[int]:
    """Return all sizes of an op above 1."""
    shapes = [operand.shape for operand in sketch.inputs if operand is not None and not operand.is_shape_like]
    sizes = {size for shape in (*shapes, *sketch.outputs) if shape for size in shape}
    for index, operand in enumerate(sketch.inputs):
        if operand is not None and operand.is_shape_like:
            sizes |= {abs(entry) for entry in _content(sketch, index) if 4 < abs(entry) < 2**31 - 1}
    sizes |= set(_large_attrs(sketch))
    return {size for size in sizes if size > 1}


def _assign(sketch: Sketch, step: _Step, palette: _Palette, attrs_mapped: bool) -> dict[int, int]:
    """Return the proxy of each size."""
    sizes = _sizes(sketch)
    if step.halvings:
        return {size: _halved(size, step.halvings) for size in sizes}
    kept: set[int] = set()
    if step.keep_small:
        kept = {entry for _, value in sketch.attrs for entry in _ints(value)}
        kept = (kept - set(_large_attrs(sketch)) if attrs_mapped else kept) | {2, 3, 4}
    for shift in range(4):
        proxies = {size: size for size in sizes & kept}
        free = palette.start + shift * palette.step
        for size in sorted(sizes - kept):
            base = max((s for s in proxies if s not in kept and s < size and size % s == 0), default=0)
            ratio = size // base if base else 0
            if base and ratio <= step.exact_ratio:
                proxies[size] = proxies[base] * ratio
            elif base and ratio <= step.soft_ratio:
                proxies[size] = proxies[base] * (2 if ratio % 2 == 0 else 3)
            else:
                while free in proxies.values():
                    free += palette.step
                proxies[size] = free
        if len(set(proxies.values())) == len(proxies):
            break
    return proxies


def _halved(size: int, times: int) -> int:
    """Return `size` divided by 2 up to `times` times, as long as it stays whole and at least 4."""
    while times and size % 2 == 0 and size >= 8:
        size, times = size // 2, times - 1
    return size


def _refinement(sketch: Sketch) -> tuple[list[list[int]], list[list[int]]] | None:
    """Return the common factors of the dims before and after, if the op could be a reshape of its only tensor.

    The dims (8, 1024, 768) and (8, 1024, 12, 64) refine to (8), (1024), (12, 64) and (8), (1024), (12), (64).
    """
    tensors = [operand for operand in sketch.inputs if operand is not None and operand.content is None]
    if len(tensors) != 1 or len(sketch.outputs) != 1:
        return None
    before, after = tensors[0].shape, sketch.outputs[0]
    if after is None or before == after or prod(before) != prod(after) or 0 in before:
        return None
    cuts = sorted({prod(shape[:i]) for shape in (before, after) for i in range(len(shape) + 1)})
    if any(right % left for left, right in pairwise(cuts)):
        return None

    def factors(shape: tuple[int, ...]) -> list[list[int]]:
        result = []
        for i in range(len(shape)):
            low, high = prod(shape[:i]), prod(shape[: i + 1])
            inside = [cut for cut in cuts if low <= cut <= high]
            result.append([right // left for left, right in pairwise(inside)])
        return result

    return factors(before), factors(after)


def _refined_shapes(sketch: Sketch, palette: _Palette) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the proxy shapes of a reshape: each common factor gets a proxy of its own."""
    refined = _refinement(sketch)
    assert refined is not None, "only called for reshapes"
    num_factors = sum(factor > 1 for dim in refined[0] for factor in dim)
    pool = [palette.start + palette.step * i for i in range(num_factors)]
    if prod(pool) > _MAX_ELEMENTS:
        pool = [palette.start + palette.step * (i % 2) for i in range(num_factors)]

    def shape(side: list[list[int]]) -> tuple[int, ...]:
        rest = iter(pool)
        return tuple(prod(next(rest) for factor in dim if factor > 1) for dim in side)

    return shape(refined[0]), shape(refined[1])


def _attempt(variant: _Variant, palette: _Palette, executor: Executor, strict: bool) -> Proxy | None:
    """Return the proxy a variant leads to, or None if the op does not run on it or its outputs have the wrong sizes."""
    sketch = variant.sketch
    scalable: list[Scaled] = []
    expected: tuple[tuple[int, ...] | None, ...]
    if variant.step is None:
        before, after = _refined_shapes(sketch, palette)
        expected = (after,)
        inputs: list[Operand | None] = []
        for index, operand in enumerate(sketch.inputs):
            if operand is None or operand.content is None:
                inputs.append(operand and replace(operand, shape=before))
            elif index in variant.mapped and len(operand.content) == len(after):
                sizes = sketch.outputs[0] or ()
                positions = [i for i, entry in enumerate(operand.content) if entry == sizes[i] > 1]
                inputs.append(_rewritten(operand, {i: after[i] for i in positions}))
                scalable += [Scaled(index, i) for i in positions]
            else:
                inputs.append(operand)
        attrs = sketch.attrs
    else:
        proxies = _assign(sketch, variant.step, palette, variant.attrs_mapped)
        if variant.step.halvings and len(set(proxies.values())) < len(proxies):
            return None  # sizes that differ must not become equal
        expected = tuple(
            None if shape is None else tuple(proxies.get(size, size) for size in shape) for shape in sketch.outputs
        )
        inputs = []
        for index, operand in enumerate(sketch.inputs):
            if operand is None or not operand.is_shape_like:
                inputs.append(operand and replace(operand, shape=tuple(proxies.get(s, s) for s in operand.shape)))
            elif index in variant.mapped:
                content = _content(sketch, index)
                entries = {
                    i: proxies[abs(entry)] * (1 if entry > 0 else -1)
                    for i, entry in enumerate(content)
                    if entry in proxies or (-entry in proxies and -entry > _LARGE_ATTR)
                }
                inputs.append(_rewritten(operand, entries))
                scalable += [Scaled(index, i) for i in entries]
            else:
                inputs.append(operand)
        attrs, large = _mapped_attrs(sketch, proxies if variant.attrs_mapped else {})
        scalable += large
    if any(operand is not None and prod(operand.shape) > _MAX_ELEMENTS for operand in inputs):
        return None
    small = replace(sketch, attrs=attrs, inputs=tuple(inputs), outputs=expected)
    proxy = _execute(Proxy(small, tuple(scalable)), executor)
    if proxy is None:
        return None
    results = proxy.sketch.outputs
    if strict:
        return proxy if results == expected else None
    ranks_agree = all(
        result is None or real is None or (len(result) == len(real) and 0 not in result)
        for result, real in zip(results, sketch.outputs, strict=True)
    )
    return proxy if ranks_agree else None


def _rewritten(operand: Operand, entries: Mapping[int, int]) -> Operand:
    """Return a constant with some entries replaced."""
    assert operand.content is not None, "only constants have entries"
    return replace(operand, content=tuple(int(entries.get(i, entry)) for i, entry in enumerate(operand.content)))


def _mapped_attrs(sketch: Sketch, proxies: Mapping[int, int]) -> tuple[tuple[tuple[str, Attr], ...], list[Scaled]]:
    """Return the attributes with large integers replaced by their proxies, if they have any, and where those are."""
    attrs: list[tuple[str, Attr]] = []
    found: list[Scaled] = []
    for name, value in sketch.attrs:
        if isinstance(value, int) and value > _LARGE_ATTR:
            attrs.append((name, proxies.get(value, value)))
            found.append(Scaled(name, 0))
        elif isinstance(value, tuple) and any(isinstance(entry, int) and entry > _LARGE_ATTR for entry in value):
            entries = _ints(value)
            attrs.append((name, tuple(proxies.get(e, e) if e > _LARGE_ATTR else e for e in entries)))
            found += [Scaled(name, i) for i, entry in enumerate(entries) if entry > _LARGE_ATTR]
        else:
            attrs.append((name, value))
    return tuple(attrs), found


def _execute(proxy: Proxy, executor: Executor) -> Proxy | None:
    """Return the proxy with the output shapes it really has, or None if it does not run."""
    outputs = run_sketch(proxy.sketch, [_plain(operand) for operand in proxy.sketch.inputs], executor)
    if outputs is None or any(output.size > _MAX_ELEMENTS * 4 for output in outputs):
        return None
    shapes = zip(proxy.sketch.outputs, outputs, strict=True)
    known = tuple(None if declared is None else output.shape for declared, output in shapes)
    return replace(proxy, sketch=replace(proxy.sketch, outputs=known))


def _plain(operand: Operand | None) -> NDArray[Any] | None:
    """Return data on which any op runs if it runs on the shape at all: indices 0, floats 1."""
    if operand is None:
        return None
    if operand.content is not None:
        return operand.array()
    return np.ones(operand.shape, dtype="float64") if operand.is_float else np.zeros(operand.shape, dtype=operand.dtype)


def run_sketch(
    sketch: Sketch, arrays: Sequence[NDArray[Any] | None], executor: Executor
) -> tuple[NDArray[Any], ...] | None:
    """Return the outputs of a sketch's op on these arrays, or None if the kernel refuses them."""
    try:
        return executor.run_kind(sketch.kind, sketch.attrs, arrays, len(sketch.outputs), sketch.opset, name=sketch.kind)
    except ExecutionError:
        return None
