"""Which small size stands for which real size.

A real size is a dim, an entry of a shape-like constant or a large integer of an attribute; equal sizes have equal
proxies, so that what the op ties together stays tied. Relations between sizes that an op may rely on are kept by
choice: ratios (a fused projection of three parts, several query heads to a key head), and those of a sliding window,

    output = (input + padding - span) // stride + 1.

A number in an attribute may count parts (the groups of a convolution, the heads of an attention): then some sizes are
multiples of it, and stay multiples of its proxy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, count, pairwise, product
from math import prod

from autopar.discover.sketch import Sketch
from autopar.ir.graph import Attr

LARGE_ATTR = 8
"""Integers of attributes above this may be sizes; below, they are axes, kernels, strides, or count parts."""
_MAX_PARTS = 16
"""A size up to this many times another one may hold that many things side by side."""
_MAX_FACTORINGS = 64
"""Up to this many ways to say which size is a multiple of which count are compared."""


@dataclass(frozen=True, slots=True)
class Step:
    """A rung of the ladder of replacements.

    Attributes:
        keep_small: Keep sizes up to 4 and sizes that occur in attributes (kernels, index depths).
        exact_ratio: Sizes that are up to this multiple of a smaller one stay the same multiple of its proxy.
        soft_ratio: Sizes that are up to this multiple become some multiple (twice or 3 times) of its proxy.
        windowed: Keep the relation of a sliding window as the op's attributes define it.
        roomy: Besides, have as many rows in half or a third of an image as windows overlap: a device takes no more from
            its neighbours than these have.
        halvings: Instead of all that, divide every size by 2 to this power where it can be. Odd sizes stay with
            `keep_small`, else they have proxies of their own.
        counts: Pairs of a size and an attribute that counts parts: the size becomes a multiple of the attribute's
            proxy. Only these attributes and the large ones are replaced.
        multiples: Pairs of a size and a smaller one: the size stays the same multiple of it.
        loose: Instead, it becomes twice or three times it.
        ordered: A larger size has a larger proxy, so that the end of a slice stays inside.
        summed: A size that the op splits by a constant is the sum of its parts.
    """

    keep_small: bool = False
    exact_ratio: int = 1
    soft_ratio: int = 1
    windowed: bool = False
    roomy: bool = False
    halvings: int = 0
    counts: tuple[tuple[int, str], ...] = ()
    multiples: tuple[tuple[int, int], ...] = ()
    loose: bool = False
    ordered: bool = False
    summed: bool = False


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
    *(Step(keep_small, halvings=halvings) for halvings in (9, 7, 5, 3, 1) for keep_small in (False, True)),
    *(Step(keep_small, ordered=True) for keep_small in (False, True)),
)


def ladder(sketch: Sketch) -> Iterator[Step]:
    """Iterate over the rungs to try, the most promising first."""
    windowed = any(name == "kernel_shape" for name, _ in sketch.attrs)
    ways = list(factorings(sketch))
    if windowed:
        for roomy in (True, False) if any(least > EVEN.start for least in _least(sketch, EVEN).values()) else (False,):
            yield replace(_WINDOWED[0], roomy=roomy)
            yield from (Step(keep_small=True, windowed=True, roomy=roomy, counts=counts) for counts in ways)
        yield from _WINDOWED[1:]
    elif together := _proportions(sketch):
        yield from (Step(keep_small, multiples=together) for keep_small in (False, True))
    yield from _LADDER[:2]
    for counts in ways:
        yield from (Step(keep_small, counts=counts) for keep_small in (False, True))
    yield from _LADDER[2:]
    # One ratio alone: 64 query heads to 8 key heads need no more, and all ratios together make proxies too large.
    for pair in _ratios(sketch, _MAX_PARTS):
        yield from (Step(keep_small, multiples=(pair,)) for keep_small in (False, True))
    # 256 heads of a scan in 8 groups: as many times a proxy would be too large.
    for pair in _ratios(sketch, max(sizes_of(sketch), default=1)):
        yield from (Step(keep_small, multiples=(pair,), loose=True) for keep_small in (False, True))
    if _parts(sketch) is not None:  # parts that have no ratio
        yield from (Step(keep_small, summed=True) for keep_small in (False, True))


def _ratios(sketch: Sketch, most: int) -> Iterator[tuple[int, int]]:
    """Iterate over pairs of a size and a smaller one that divides it into at most so many parts."""
    sizes = sorted(sizes_of(sketch))
    for small, large in combinations(sizes, 2):
        if large % small == 0 and large // small <= most:
            yield large, small


def made_sizes(sketch: Sketch) -> tuple[int, ...]:
    """Return the sizes above 1 that an output has (more often) and no input has."""
    inputs = [operand.shape for operand in sketch.inputs if operand is not None and operand.content is None]
    made = (
        size
        for shape in sketch.outputs
        for size in shape or ()
        if size > 1 and all(before.count(size) < (shape or ()).count(size) for before in inputs)
    )
    return tuple(dict.fromkeys(made))


def _proportions(sketch: Sketch) -> tuple[tuple[int, int], ...]:
    """Return which sizes are a few times another one because the op puts parts together or takes them apart."""
    sizes = sizes_of(sketch)
    pairs: dict[int, int] = {}
    for made in made_sizes(sketch):
        for size in sizes:
            large, small = max(size, made), min(size, made)
            if large != small and large % small == 0 and large // small <= _MAX_PARTS:
                pairs.setdefault(large, small)
    return tuple(pairs.items())


def factorings(sketch: Sketch) -> Iterator[tuple[tuple[int, str], ...]]:
    """Iterate over the ways in which sizes may be multiples of counts among the attributes; see `Step.counts`.

    With several counts (query heads and key heads), the way that leaves the fewest different factors comes first: a
    hidden size of 32 heads and one of 8 heads have the head size in common.
    """
    sizes = sizes_of(sketch)
    fixed = {1, len(sketch.inputs), len(sketch.outputs)}  # a number of outputs cannot change
    numbers = {
        name: value
        for name, value in sketch.attrs
        if isinstance(value, int) and value > 0 and value not in fixed and any(size % value == 0 for size in sizes)
    }
    for length in range(min(len(numbers), 3), 0, -1):
        for names in combinations(numbers, length):
            options = [[(size, name) for name in names if size % numbers[name] == 0] for size in sizes]
            ways = [way for _, way in zip(range(_MAX_FACTORINGS), product(*filter(None, options)), strict=False)]
            ways.sort(key=lambda way: len({size // numbers[name] for size, name in way} - {1, *sizes}))
            for way in ways[:2]:
                factors = {size // numbers[name] for size, name in way}
                yield tuple((size, name) for size, name in way if size not in factors or size == numbers[name])


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


@dataclass(frozen=True, slots=True)
class Assignment:
    """The proxies of an op.

    Attributes:
        sizes: Proxy by size.
        counts: Proxy by name of the attribute that counts parts.
    """

    sizes: Mapping[int, int]
    counts: Mapping[str, int]


def assign(sketch: Sketch, step: Step, palette: Palette, attrs_mapped: bool) -> Assignment | None:
    """Return the proxy of each size and count, or None if sizes that differ would become equal.

    Args:
        sketch: The real op.
        step: What has to be kept.
        palette: The proxies to choose from.
        attrs_mapped: Whether large integers of attributes are replaced, too.
    """
    sizes = sizes_of(sketch)
    if step.halvings:
        halved = {size: _halved(size, step.halvings) for size in sizes}
        if not step.keep_small:
            pool = (p for p in count(palette.start, palette.step) if p not in halved.values())
            halved |= {size: next(pool) for size in sizes if size % 2}
        return Assignment(halved, {}) if len(set(halved.values())) == len(halved) else None
    numbers = {name: value for name, value in sketch.attrs if isinstance(value, int)}
    counted = {name: numbers[name] for _, name in step.counts}
    large = set(large_attrs(sketch)) - set(counted.values())
    kept: set[int] = set()
    if step.keep_small:
        kept = {entry for name, value in sketch.attrs if name not in counted for entry in integers(value)}
        kept = (kept - large if attrs_mapped else kept) | {2, 3, 4}
    multiples, counts_of = dict(step.multiples), dict(step.counts)
    fixed = {size: size for size in sizes if size in kept and size not in multiples and size not in counts_of}
    windows: dict[int, _Window] = {}
    if step.windowed:
        if attrs_mapped:  # above all a kernel must be small; it need not be divisible
            fixed |= {size: 4 * (i + 1) for i, size in enumerate(sorted(large - kept))}
        windows = _windows(sketch, set(sizes) - fixed.keys(), fixed)
    least = _least(sketch, palette) if step.roomy else {}
    produced = {window.output for window in windows.values()}
    counts = _count_proxies(counted, palette)
    # In order of appearance, so that (B, K) x (K, N) has one proxy whether K or N is larger; ratios need the small ones
    # first.
    listed = sorted(sizes) if step.ordered or step.exact_ratio > 1 else sizes
    order = [size for size in listed if size not in fixed]
    order.sort(key=lambda size: size not in produced)
    for shift in range(4):
        proxies = dict(fixed)
        free = palette.start

        def fresh(size: int, proxies: dict[int, int], shift: int = shift) -> int:
            """Give a size the next proxy that is free."""
            nonlocal free
            while free in proxies.values():
                free += palette.step
            proxy = free
            while proxy in proxies.values() or proxy < least.get(size, 0):
                proxy += palette.step
            proxies[size] = proxy
            free = max(free, palette.start + shift * palette.step)
            return proxy

        for size in order:
            base = max((s for s in proxies if s not in fixed and s < size and size % s == 0), default=0)
            ratio = size // base if base else 0
            window = windows.get(size)
            if size in proxies:  # as a factor of another one
                continue
            if window is not None and window.output in proxies:
                proxies[size] = (proxies[window.output] - 1) * window.stride + window.extra
            elif size in counts_of and size not in produced:
                factor = size // counted[counts_of[size]]
                known = 1 if factor == 1 else proxies.get(factor) or fresh(factor, proxies)
                proxies[size] = counts[counts_of[size]] * known
            elif size in multiples:
                small = multiples[size]
                times = size // small
                if step.loose:
                    times = 2 if times % 2 == 0 else 3
                proxies[size] = times * (proxies.get(small) or fresh(small, proxies))
            elif base and ratio <= step.exact_ratio:
                proxies[size] = proxies[base] * ratio
            elif base and ratio <= step.soft_ratio:
                proxies[size] = proxies[base] * (2 if ratio % 2 == 0 else 3)
            else:
                fresh(size, proxies)
        if len(set(proxies.values())) == len(proxies):
            break
    return Assignment(_summed(sketch, proxies) if step.summed else proxies, counts)


def _summed(sketch: Sketch, proxies: dict[int, int]) -> dict[int, int]:
    """Return proxies in which a size that the op splits has the sum of its parts, unless another size has that."""
    found = _parts(sketch)
    if found is None:
        return proxies
    whole, parts = found
    total = sum(proxies.get(part, part) for part in parts)
    others = [proxy for size, proxy in proxies.items() if size != whole]
    return proxies if whole in parts or whole not in proxies or total in others else {**proxies, whole: total}


def _parts(sketch: Sketch) -> tuple[int, tuple[int, ...]] | None:
    """Return the size that an op splits by a constant, and the sizes of its parts."""
    if sketch.kind != "Split" or len(sketch.inputs) != 2:
        return None
    data, parts = sketch.inputs
    axis = dict(sketch.attrs).get("axis", 0)
    if data is None or parts is None or not parts.is_shape_like or not isinstance(axis, int):
        return None
    return (data.shape[axis], content(sketch, 1)) if -len(data.shape) <= axis < len(data.shape) else None


def _count_proxies(counted: Mapping[str, int], palette: Palette) -> dict[str, int]:
    """Return the proxies of attributes that count parts; equal counts are equal, multiples stay multiples."""
    proxies: dict[int, int] = {}
    for value in sorted(set(counted.values())):
        base = max((v for v in proxies if value % v == 0), default=0)
        if base:
            proxies[value] = proxies[base] * (2 if value // base % 2 == 0 else 3)
        else:
            proxies[value] = palette.start + palette.step * len(proxies)
    return {name: proxies[value] for name, value in counted.items()}


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


def _least(sketch: Sketch, palette: Palette) -> dict[int, int]:
    """Return the least proxy of each spatial size of which half, or a third, has as many rows as windows overlap."""
    attrs, blocks = dict(sketch.attrs), 2 if palette.step % 3 else 3
    kernels = integers(attrs["kernel_shape"])
    strides, dilations = (integers(attrs.get(name, (1,) * len(kernels))) for name in ("strides", "dilations"))
    shapes = [operand.shape for operand in sketch.inputs if operand is not None and operand.content is None]
    least: dict[int, int] = {}
    for shape in (*shapes, *sketch.outputs):
        spatial = (shape or ())[-len(kernels) :]
        if len(shape or ()) != len(kernels) + 2 or spatial == kernels:  # the kernel itself
            continue
        for size, kernel, stride, dilation in zip(spatial, kernels, strides, dilations, strict=True):
            reach = -(-(kernel - 1) * dilation // stride)
            least[size] = max(least.get(size, 0), blocks * reach)
    return least


WINDOW_ATTRS = ("kernel_shape", "strides", "dilations", "pads", "output_padding")
"""Attributes that say how a window slides."""


SPAN_ATTRS: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    (f"autopar::{name}Attention{grad}" for name in ("Causal", "Sink") for grad in ("", "Grad")), ("window", "chunk")
)
"""Attributes by kind that say how many tokens before its own a query of attention sees; 0 for all."""


def span_proxy(name: str, tokens: int) -> int:
    """Return the window or chunk of a proxy op with `tokens` keys; the size in the real op does not matter.

    A window of half the tokens hides keys from half of the queries. A chunk of one token more has its only border where
    no two or three equal blocks of tokens have one: else chunks that happen to be blocks would pass for a strategy.

    >>> [(span_proxy("window", tokens), span_proxy("chunk", tokens)) for tokens in (4, 6, 12)]
    [(2, 3), (3, 4), (6, 7)]
    """
    return max(1, tokens // 2) + (name == "chunk")


def overlaps(attrs: tuple[tuple[str, Attr], ...]) -> tuple[bool, ...]:
    """Return whether neighbouring windows have rows in common, per spatial dim; () for an op without windows."""
    named = dict(attrs)
    if "kernel_shape" not in named:
        return ()
    kernels = integers(named["kernel_shape"])
    strides, dilations = (integers(named.get(name, (1,) * len(kernels))) for name in ("strides", "dilations"))
    return tuple((k - 1) * d + 1 > s for k, s, d in zip(kernels, strides, dilations, strict=True))


def _halved(size: int, times: int) -> int:
    """Return `size` divided by 2 up to `times` times, as long as it stays even and at least 4."""
    while times and size % 4 == 0 and size >= 8:
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

    If that makes more than `max_elements`, proxies are used twice, or one is used for all factors.
    """
    refined = refinement(sketch)
    assert refined is not None, "only called for reshapes"
    num_factors = sum(factor > 1 for dim in refined[0] for factor in dim)
    pool = [palette.start + palette.step * i for i in range(num_factors)]
    for different in (2, 1):
        if prod(pool) > max_elements:
            pool = [palette.start + palette.step * (i % different) for i in range(num_factors)]

    def shape(side: list[list[int]]) -> tuple[int, ...]:
        rest = iter(pool)
        return tuple(prod(next(rest) for factor in dim if factor > 1) for dim in side)

    return shape(refined[0]), shape(refined[1])
