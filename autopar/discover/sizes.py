"""Which small size stands for which real size.

A real size is a dim, an entry of a shape-like constant or a large integer of an attribute; equal sizes have equal
proxies, so that what the op ties together stays tied. Relations between sizes that an op may rely on are kept by
choice: ratios (a fused projection of three parts, several query heads to a key head), and those of a sliding window,

    output = (input + padding - span) // stride + 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from autopar.discover.sketch import Sketch
from autopar.ir.graph import Attr

LARGE_ATTR = 8
"""Integers of attributes above this may be sizes (heads, groups); below, they are axes, kernels, strides."""


@dataclass(frozen=True, slots=True)
class Step:
    """A rung of the ladder of replacements.

    Attributes:
        keep_small: Keep sizes up to 4 and sizes that occur in attributes (kernels, index depths).
        exact_ratio: Sizes that are up to this multiple of a smaller one stay the same multiple of its proxy.
        soft_ratio: Sizes that are up to this multiple become some multiple (twice or 3 times) of its proxy.
        windowed: Keep the relation of a sliding window as the op's attributes define it.
        halvings: Instead of all that, divide every size by 2 to this power where it can be.
    """

    keep_small: bool = False
    exact_ratio: int = 1
    soft_ratio: int = 1
    windowed: bool = False
    halvings: int = 0


@dataclass(frozen=True, slots=True)
class Palette:
    """The proxy sizes: `start`, `start + step`, ...; half or a third of each has at least 2 elements."""

    start: int
    step: int


EVEN = Palette(4, 2)
TRIPLES = (Palette(6, 3), Palette(12, 12))
"""Multiples of 3, and for ops that need their sizes divisible by 4 as well, of 12."""

_WINDOWED = tuple(Step(keep_small=True, exact_ratio=r, soft_ratio=r, windowed=True) for r in (1, 4, 16))
_LADDER = (
    *(
        Step(keep_small, exact, soft)
        for exact, soft in ((1, 1), (2, 2), (2, 4), (2, 128), (4, 4), (16, 16), (64, 64))
        for keep_small in (False, True)
    ),
    *(Step(keep_small=True, halvings=halvings) for halvings in (9, 7, 5, 3, 1)),
)


def ladder(sketch: Sketch) -> tuple[Step, ...]:
    """Return the rungs to try, the most promising first."""
    return _WINDOWED + _LADDER if any(name == "kernel_shape" for name, _ in sketch.attrs) else _LADDER


def content(sketch: Sketch, index: int) -> tuple[int, ...]:
    """Return the entries of a shape-like constant."""
    operand = sketch.inputs[index]
    assert operand is not None, "only called for constants"
    return tuple(int(entry) for entry in operand.content or ())


def integers(value: Attr) -> tuple[int, ...]:
    """Return the integers in an attribute's value."""
    entries = value if isinstance(value, tuple) else (value,)
    return tuple(entry for entry in entries if isinstance(entry, int))


def large_attrs(sketch: Sketch) -> tuple[int, ...]:
    """Return the integers of attributes that may be sizes."""
    return tuple(entry for _, value in sketch.attrs for entry in integers(value) if entry > LARGE_ATTR)


def sizes_of(sketch: Sketch) -> tuple[int, ...]:
    """Return all distinct sizes of an op above 1, in order of appearance."""
    shapes = [operand.shape for operand in sketch.inputs if operand is not None and not operand.is_shape_like]
    sizes = [size for shape in (*shapes, *sketch.outputs) if shape for size in shape]
    for index, operand in enumerate(sketch.inputs):
        if operand is not None and operand.is_shape_like:
            sizes += [abs(entry) for entry in content(sketch, index) if 4 < abs(entry) < 2**31 - 1]
    return tuple(size for size in dict.fromkeys((*sizes, *large_attrs(sketch))) if size > 1)


def assign(sketch: Sketch, step: Step, palette: Palette, attrs_mapped: bool) -> dict[int, int] | None:
    """Return the proxy of each size, or None if sizes that differ would become equal.

    Args:
        sketch: The real op.
        step: What has to be kept.
        palette: The proxies to choose from.
        attrs_mapped: Whether large integers of attributes are replaced, too.
    """
    sizes = sizes_of(sketch)
    if step.halvings:
        halved = {size: _halved(size, step.halvings) for size in sizes}
        return halved if len(set(halved.values())) == len(halved) else None
    kept: set[int] = set()
    if step.keep_small:
        kept = {entry for _, value in sketch.attrs for entry in integers(value)}
        kept = (kept - set(large_attrs(sketch)) if attrs_mapped else kept) | {2, 3, 4}
    fixed = {size: size for size in sizes if size in kept}
    windows: dict[int, _Window] = {}
    if step.windowed:
        if attrs_mapped:  # above all a kernel must be small; it need not be divisible
            fixed |= {size: 4 * (i + 1) for i, size in enumerate(sorted(set(large_attrs(sketch)) - kept))}
        windows = _windows(sketch, set(sizes) - fixed.keys(), fixed)
    produced = {window.output for window in windows.values()}
    # In order of appearance, so that (B, K) x (K, N) has one proxy whether K or N is larger; ratios need the small ones
    # first.
    order = [size for size in (sizes if step.exact_ratio == 1 else sorted(sizes)) if size not in fixed]
    order.sort(key=lambda size: size not in produced)
    for shift in range(4):
        proxies = dict(fixed)
        free = palette.start
        for size in order:
            base = max((s for s in proxies if s not in fixed and s < size and size % s == 0), default=0)
            ratio = size // base if base else 0
            window = windows.get(size)
            if window is not None and window.output in proxies:
                proxies[size] = (proxies[window.output] - 1) * window.stride + window.extra
            elif base and ratio <= step.exact_ratio:
                proxies[size] = proxies[base] * ratio
            elif base and ratio <= step.soft_ratio:
                proxies[size] = proxies[base] * (2 if ratio % 2 == 0 else 3)
            else:
                while free in proxies.values():
                    free += palette.step
                proxies[size] = free
                free = max(free, palette.start + shift * palette.step)
        if len(set(proxies.values())) == len(proxies):
            break
    return proxies


@dataclass(frozen=True, slots=True)
class _Window:
    """How the proxy of a sliding window's input follows from that of its output: (output - 1) * stride + extra."""

    output: int
    stride: int
    extra: int


def _windows(sketch: Sketch, sizes: set[int], fixed: Mapping[int, int]) -> dict[int, _Window]:
    """Return the sizes among `sizes` that are the input of the op's sliding window with an output among them.

    Args:
        sketch: The real op; it has an attribute `kernel_shape`.
        sizes: The sizes to relate.
        fixed: Proxies already chosen, which may replace kernels and strides.
    """
    attrs = dict(sketch.attrs)
    kernels = integers(attrs["kernel_shape"])
    ones = (1,) * len(kernels)
    strides, dilations = (integers(attrs.get(name, ones)) for name in ("strides", "dilations"))
    pads = integers(attrs.get("pads", (0, 0) * len(kernels)))
    windows: dict[int, _Window] = {}
    for kernel, stride, dilation, begin, end in zip(
        kernels, strides, dilations, pads[: len(kernels)], pads[len(kernels) :], strict=True
    ):
        room = begin + end - (kernel - 1) * dilation - 1
        small = fixed.get(stride, stride)
        span = (fixed.get(kernel, kernel) - 1) * dilation + 1
        for size in sizes:
            steps = -(-(size + room) // stride) if attrs.get("ceil_mode") else (size + room) // stride
            output = steps + 1
            if output < size and output in sizes and size not in windows:
                rest = max(1 - small, min(size + room - steps * stride, small - 1))
                windows[size] = _Window(output, small, span - begin - end + rest)
    return windows


WINDOW_ATTRS = ("kernel_shape", "strides", "dilations", "pads", "output_padding")
"""Attributes that say how a window slides."""


def overlaps(attrs: tuple[tuple[str, Attr], ...]) -> tuple[bool, ...]:
    """Return whether neighbouring windows have rows in common, per spatial dim; () for an op without windows."""
    named = dict(attrs)
    kernels = integers(named.get("kernel_shape", ()))
    strides, dilations = (integers(named.get(name, (1,) * len(kernels))) for name in ("strides", "dilations"))
    return tuple((k - 1) * d + 1 > s for k, s, d in zip(kernels, strides, dilations, strict=True))


def _halved(size: int, times: int) -> int:
    """Return `size` divided by 2 up to `times` times, as long as it stays whole and at least 4."""
    while times and size % 2 == 0 and size >= 8:
        size, times = size // 2, times - 1
    return size


def refinement(sketch: Sketch) -> tuple[list[list[int]], list[list[int]]] | None:
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


def refined_shapes(sketch: Sketch, palette: Palette, max_elements: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the proxy shapes of a reshape before and after it: each common factor gets a proxy of its own.

    If that makes more than `max_elements`, proxies are used twice.
    """
    refined = refinement(sketch)
    assert refined is not None, "only called for reshapes"
    num_factors = sum(factor > 1 for dim in refined[0] for factor in dim)
    pool = [palette.start + palette.step * i for i in range(num_factors)]
    if prod(pool) > max_elements:
        pool = [palette.start + palette.step * (i % 2) for i in range(num_factors)]

    def shape(side: list[list[int]]) -> tuple[int, ...]:
        rest = iter(pool)
        return tuple(prod(next(rest) for factor in dim if factor > 1) for dim in side)

    return shape(refined[0]), shape(refined[1])
