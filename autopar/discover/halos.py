"""Strategies of sliding windows over a sharded spatial dim: a device needs some rows of its neighbours (a halo).

A window op relates the rows of an *image* to its *windows*: window w covers `span` rows from `stride * w - padding` on.
A convolution maps image to windows, a transposed one windows to image, a gradient may take both. On a device that is to
make its block of the result:

- An image gets the rows that the windows of the device's block reach, and loses its padding; the halo stands for it.
- Windows get those of the neighbours that reach into the device's rows. How many is tried, the fewest first. The result
  is cut to those rows by more padding, or, if the image is an input, too, by the attribute `crop`.

Whether a candidate holds is found by running it. What it says about windows is only true of the real op if the proxy
has the same windows (`Proxy.same_windows`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from autopar.discover.rules import Halo, Replaced, Scaled, Strategy
from autopar.discover.sizes import integers
from autopar.discover.sketch import Sketch
from autopar.discover.trial import Trial
from autopar.ir.graph import Attr
from autopar.sharding import Placement, Replicate, Shard

_FILLS = ("lowest", "zero")
"""In this order: a maximum may survive a zero by luck, a sum never an infinity."""
_SPATIAL = 2
"""The first spatial dim; batch and channels come before it."""


def halo_strategies(trial: Trial, found: Sequence[Strategy]) -> Iterator[Strategy]:
    """Iterate over the strategies on 2 devices that shard a spatial dim and need a halo, at most one per dim.

    Args:
        trial: The op with data.
        found: Strategies without halos; where one shards the same, no halo is needed.
    """
    sketch, known = trial.proxy.sketch, {strategy.inputs for strategy in found}
    sliding = _sliding(sketch)
    if not sliding or not trial.proxy.same_windows:
        return
    numbers = tuple((n,) for n in trial.proxy.scalable if isinstance(n.source, int))  # the size of an output
    for dim in range(_SPATIAL, _SPATIAL + len(integers(dict(sketch.attrs)["kernel_shape"]))):
        placements: tuple[Placement, ...] = tuple(
            Shard(dim) if i in sliding else Replicate() for i in range(len(sketch.inputs))
        )
        if placements in known:
            continue
        for candidate in _candidates(sketch, placements, sliding, dim, ((), *numbers)):
            outputs = trial.run(candidate, 2)
            # One image whose windows are not split: the few there are happen to lie on one of 2 devices.
            split = len(sliding) > 1 or any(isinstance(placement, Shard) for placement in outputs or ())
            if outputs is not None and split:
                yield replace(candidate, outputs=outputs)
                break


def _sliding(sketch: Sketch) -> list[int]:
    """Return the inputs with spatial dims: image, windows or both; the spatial dims of a weight are the kernel."""
    kernel = integers(dict(sketch.attrs).get("kernel_shape", ()))
    return [
        i
        for i, operand in enumerate(sketch.inputs)
        if kernel and operand is not None and operand.content is None
        if len(operand.shape) == _SPATIAL + len(kernel) and operand.shape[_SPATIAL:] != kernel
    ]


@dataclass(frozen=True, slots=True)
class _Window:
    """How the window moves over one spatial dim.

    Attributes:
        span: Rows from its first to its last tap.
        stride: Rows from one window to the next.
        begin: Padding before the image.
        end: Padding behind it.
    """

    span: int
    stride: int
    begin: int
    end: int

    @classmethod
    def of(cls, attrs: dict[str, Attr], axis: int) -> "_Window":
        """Return the window over spatial dim `axis`, counted from 0."""
        kernel = integers(attrs["kernel_shape"])
        ones, none = (1,) * len(kernel), (0, 0) * len(kernel)
        strides, dilations = (integers(attrs.get(name, ones)) for name in ("strides", "dilations"))
        pads = integers(attrs.get("pads", none))
        return cls((kernel[axis] - 1) * dilations[axis] + 1, strides[axis], pads[axis], pads[axis + len(kernel)])


def _candidates(
    sketch: Sketch,
    placements: tuple[Placement, ...],
    sliding: Sequence[int],
    dim: int,
    scalings: Sequence[tuple[Scaled, ...]],
) -> Iterator[Strategy]:
    """Iterate over the ways to shard the sliding inputs along one dim with halos."""
    attrs, axis = dict(sketch.attrs), dim - _SPATIAL
    window = _Window.of(attrs, axis)
    overlap = -(-(window.span - 1) // window.stride)
    neighbours = sorted(product(range(overlap + 1), repeat=2), key=sum)
    roles: list[tuple[int | None, int | None]] = [(sliding[0], sliding[-1])]
    if len(sliding) == 1:
        roles = [(sliding[0], None), (None, sliding[0])]
    for image, windows in roles:
        for previous, following in neighbours if windows is not None else neighbours[:1]:
            reached = (
                window.begin + window.stride * previous,
                max(0, window.span - window.stride - window.begin + window.stride * following),
            )
            cut = window.begin + window.stride * previous, window.end + window.stride * following
            changed = _changed(attrs, "pads", axis, (0, 0) if image is not None else cut)
            if image is not None and "crop" in attrs:
                changed += _changed(attrs, "crop", axis, reached)
            if any(number.attr not in attrs for number in changed):
                continue  # no padding to change
            for fill, scaled in product(_FILLS if image is not None else ("",), scalings):
                halos = [Halo(image, dim, *reached, fill)] if image is not None else []
                halos += [Halo(windows, dim, previous, following)] if windows is not None else []
                needed = tuple(halo for halo in halos if halo.before or halo.after)
                if needed:
                    yield Strategy(placements, (), scaled, needed, tuple(changed))


def _changed(attrs: dict[str, Attr], name: str, axis: int, ends: tuple[int, int]) -> list[Replaced]:
    """Return the numbers of an attribute (all beginnings, then all ends) that have to become others."""
    rank = len(integers(attrs["kernel_shape"]))
    present = integers(attrs.get(name, (0, 0) * rank))
    entries = zip((axis, axis + rank), ends, strict=True)
    return [Replaced(name, entry, value) for entry, value in entries if present[entry] != value]
