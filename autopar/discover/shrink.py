"""Proxy ops: the same op on small shapes, so that discovery does not depend on the size of the model.

Every size of the op (dims, entries of shape-like constants, large integers in attributes) is replaced by a small proxy
size (`sizes`). What is allowed to change is found by trying: a ladder of replacements, from the freest (every distinct
size gets a proxy of its own) to the most faithful (ratios kept, sizes halved), each executed; the first on which the op
runs and whose output sizes are the proxies of the real ones is taken. Two proxies are made by the same replacement: an
*even* one, whose proxies are divisible by 2, and a *triple* one, whose proxies are divisible by 3.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.discover.chunks import Count, chunk_counts
from autopar.discover.rules import Scaled
from autopar.discover.sizes import (
    EVEN,
    LARGE_ATTR,
    SPAN_ATTRS,
    TRIPLES,
    WINDOW_ATTRS,
    Palette,
    Step,
    assign,
    content,
    integers,
    ladder,
    large_attrs,
    overlaps,
    refined_shapes,
    refinement,
    sizes_of,
    span_proxy,
)
from autopar.discover.sketch import Operand, Sketch
from autopar.errors import ExecutionError
from autopar.execute import Executor
from autopar.ir.graph import Attr

_MAX_ELEMENTS = 100_000
"""No proxy tensor is larger: a run stays below a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A small op with the rule of a large one.

    Attributes:
        sketch: The small op; its outputs are what it really computes.
        scalable: The numbers that stand for sizes or counts, which a shard of the op may need divided.
        same_windows: Whether its windows are those of the large op: as long, as far apart, as much padding, and output
            sizes that follow from input sizes as they do there.
        counts: The numbers of chunks that mean something.
    """

    sketch: Sketch
    scalable: tuple[Scaled, ...]
    same_windows: bool = True
    counts: tuple[Count, ...] = ()


def shrink(sketch: Sketch, executor: Executor) -> tuple[Proxy, Proxy] | None:
    """Return the even and the triple proxy of an op, or None if nothing on the ladder can be executed."""
    large = 2 * _MAX_ELEMENTS
    spans = tuple(name for name, value in sketch.attrs if name in SPAN_ATTRS.get(sketch.kind, ()) and value)
    free = replace(sketch, attrs=tuple(attr for attr in sketch.attrs if attr[0] not in spans))
    for strict in (True, False):
        for variant in _variants(free):
            even = _attempt(variant, EVEN, executor, strict, spans)
            if even is None:
                continue
            for palette in TRIPLES:
                triple = _attempt(variant, palette, executor, strict, spans)
                if triple is not None:
                    return _with_counts(sketch, even, triple)
    if all(operand is None or prod(operand.shape) <= large for operand in sketch.inputs):
        raw = _execute(Proxy(sketch, ()), executor)
        if raw is not None:
            return _with_counts(sketch, raw, raw)
    return None


def _with_counts(sketch: Sketch, even: Proxy, triple: Proxy) -> tuple[Proxy, Proxy]:
    """Return the proxies with the numbers of chunks they and the real op have in common."""
    counts = chunk_counts(sketch, even.sketch, triple.sketch)
    return replace(even, counts=counts), replace(triple, counts=counts)


@dataclass(frozen=True, slots=True)
class _Variant:
    """One choice of the ladder: how sizes are replaced, and which shape-like constants and attributes are."""

    sketch: Sketch
    step: Step | None
    mapped: tuple[int, ...]
    attrs_mapped: bool


def _variants(sketch: Sketch) -> Iterator[_Variant]:
    """Iterate over the ladder; a step of None refines the dims of a reshape."""
    consts = tuple(i for i, operand in enumerate(sketch.inputs) if operand is not None and operand.is_shape_like)
    sizes = sizes_of(sketch)
    mappable = [i for i in consts if any(abs(entry) in sizes for entry in content(sketch, i))]
    choices = sorted(product((True, False), repeat=len(mappable)), key=lambda choice: -sum(choice))
    subsets = [tuple(i for i, chosen in zip(mappable, choice, strict=True) if chosen) for choice in choices]
    if refinement(sketch) is not None:
        yield from (_Variant(sketch, None, subset, False) for subset in subsets)
    for step in ladder(sketch):
        # Attributes last: a type code such as Cast's `to` looks like a size, but is none; groups and kernels are.
        attr_choices = (step.windowed, not step.windowed) if large_attrs(sketch) else (False,)
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


def _attempt(
    variant: _Variant, palette: Palette, executor: Executor, strict: bool, spans: Sequence[str] = ()
) -> Proxy | None:
    """Return the proxy a variant leads to, or None if the op does not run on it or its outputs have the wrong sizes.

    Args:
        variant: How sizes are replaced.
        palette: The sizes of the proxy.
        executor: Runs the op.
        strict: Whether every output size has to be the proxy of the real one.
        spans: Attributes among `SPAN_ATTRS` that the op has; the variant's sketch lacks them.
    """
    sketch = variant.sketch
    scalable: list[Scaled] = []
    expected: tuple[tuple[int, ...] | None, ...]
    if variant.step is None:
        before, after = refined_shapes(sketch, palette, _MAX_ELEMENTS)
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
        assignment = assign(sketch, variant.step, palette, variant.attrs_mapped)
        if assignment is None:
            return None
        proxies = assignment.sizes
        expected = tuple(
            None if shape is None else tuple(proxies.get(size, size) for size in shape) for shape in sketch.outputs
        )
        inputs = []
        for index, operand in enumerate(sketch.inputs):
            if operand is None or not operand.is_shape_like:
                inputs.append(operand and replace(operand, shape=tuple(proxies.get(s, s) for s in operand.shape)))
            elif index in variant.mapped:
                numbers = content(sketch, index)
                entries = {
                    i: proxies[abs(entry)] * (1 if entry > 0 else -1)
                    for i, entry in enumerate(numbers)
                    if entry in proxies or (-entry in proxies and -entry > LARGE_ATTR)
                }
                inputs.append(_rewritten(operand, entries))
                scalable += [Scaled(index, i) for i in entries]
            else:
                inputs.append(operand)
        attrs, divisible = _mapped_attrs(sketch, proxies if variant.attrs_mapped else {}, assignment.counts)
        scalable += divisible
    if any(operand is not None and prod(operand.shape) > _MAX_ELEMENTS for operand in inputs):
        return None
    if overlaps(attrs) != overlaps(sketch.attrs):  # windows that overlap tie neighbouring blocks together
        return None
    if spans:
        keys = inputs[1]
        assert keys is not None, "attention has keys"
        attrs = tuple(sorted((*attrs, *((name, span_proxy(name, keys.shape[-2])) for name in spans))))
    small = replace(sketch, attrs=attrs, inputs=tuple(inputs), outputs=expected)
    proxy = _execute(Proxy(small, tuple(scalable), strict and _same_windows(attrs, sketch.attrs)), executor)
    if proxy is None:
        return None
    results = proxy.sketch.outputs
    if strict:
        return proxy if results == expected else None
    ranks_agree = all(
        result is None or real is None or (len(result) == len(real) and 0 not in result)
        for result, real in zip(results, sketch.outputs, strict=True)
    )
    return proxy if ranks_agree and _equal_sizes(proxy.sketch) == _equal_sizes(sketch) else None


def _equal_sizes(sketch: Sketch) -> tuple[bool, ...]:
    """Return for each dim of an input and each dim of an output whether they have the same size.

    An op may do to a whole dim what it does not do to a part of it: a slice of all rows is the identity.
    """
    inputs = [size for operand in sketch.inputs if operand and operand.content is None for size in operand.shape]
    outputs = [size for shape in sketch.outputs for size in shape or ()]
    return tuple(before == after for before in inputs for after in outputs)


def _same_windows(attrs: tuple[tuple[str, Attr], ...], others: tuple[tuple[str, Attr], ...]) -> bool:
    """Whether windows slide alike."""
    first, second = dict(attrs), dict(others)
    return all(first.get(name) == second.get(name) for name in WINDOW_ATTRS)


def _rewritten(operand: Operand, entries: Mapping[int, int]) -> Operand:
    """Return a constant with some entries replaced."""
    assert operand.content is not None, "only constants have entries"
    return replace(operand, content=tuple(int(entries.get(i, entry)) for i, entry in enumerate(operand.content)))


def _mapped_attrs(
    sketch: Sketch, proxies: Mapping[int, int], counts: Mapping[str, int]
) -> tuple[tuple[tuple[str, Attr], ...], list[Scaled]]:
    """Return the attributes with counts and large integers replaced by their proxies, and what a shard may divide.

    Any number above 1 may be a count to divide; execution tells it from an axis or a kernel.
    """
    attrs: list[tuple[str, Attr]] = []
    found: list[Scaled] = []
    for name, value in sketch.attrs:
        if name in counts:
            attrs.append((name, counts[name]))
            found.append(Scaled(name, 0))
        elif isinstance(value, int) and value > 1:
            attrs.append((name, proxies.get(value, value) if value > LARGE_ATTR else value))
            found.append(Scaled(name, 0))
        elif isinstance(value, tuple) and any(isinstance(entry, int) and entry > LARGE_ATTR for entry in value):
            entries = integers(value)
            attrs.append((name, tuple(proxies.get(e, e) if e > LARGE_ATTR else e for e in entries)))
            found += [Scaled(name, i) for i, entry in enumerate(entries) if entry > LARGE_ATTR]
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
