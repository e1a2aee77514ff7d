"""Gradients of sampling an image at the places of a grid, with linear interpolation or at whole places.

A pixel at distance t < 1 from a place, along each dim, counts 1 - t there, and all others nothing: so a sum over all
pixels says the same as one over those around a place, and pixels can be split. Kernels read those around a place only.

`places_NYXI` are in pixels from the first, columns before rows before planes; `rows_H`, ... number the pixels of each
dim (0, 1, 2, ...), a shard of which stands for a shard of the image.
Names: N samples, C channels, (Z, Y, X) results, (D, H, W) pixels.
"""

_DIMS = {"": "yx", "3D": "zyx"}
_PIXELS = {"z": "d", "y": "h", "x": "w"}


def _weights(dims: str, *, slopes: bool = False) -> str:
    """Return lines that say how much each pixel counts at each place, by dim, and how that changes."""
    parts = ", ".join(f"place_{dim}" for dim in reversed(dims))
    lines = [
        "    one_1 = Constant <value_ints = [1]> ()",
        "    one = CastLike (one_1, places)",
        f"    {parts} = Split <axis = -1, num_outputs = {len(dims)}> (places)",
    ]
    for dim in dims:
        lines += [
            f"    row_{dim} = CastLike (rows_{_PIXELS[dim].upper()}, places)",
            f"    off_{dim} = Sub (place_{dim}, row_{dim})",
            f"    far_{dim} = Abs (off_{dim})",
            f"    near_{dim} = Sub (one, far_{dim})",
            f"    weight_{dim} = Relu (near_{dim})",
        ]
        if slopes:
            lines += [
                f"    low_{dim} = Floor (place_{dim})",
                f"    high_{dim} = Add (low_{dim}, one)",
                f"    is_low_{dim} = Equal (low_{dim}, row_{dim})",
                f"    is_high_{dim} = Equal (high_{dim}, row_{dim})",
                f"    falls_{dim} = CastLike (is_low_{dim}, places)",
                f"    rises_{dim} = CastLike (is_high_{dim}, places)",
                f"    slope_{dim} = Sub (rises_{dim}, falls_{dim})",
            ]
    return "\n".join(lines)


def _gradients(suffix: str) -> str:
    """Return the gradients of sampling some spatial dims."""
    dims = _DIMS[suffix]
    pixels = "".join(_PIXELS[dim] for dim in dims)
    rows = ", ".join(f"rows_{pixel.upper()}" for pixel in pixels)
    weights = ", ".join(f"weight_{dim}" for dim in dims)
    at = ",".join(f"n{dims}{pixel}" for pixel in pixels)
    moved = []
    for dim in dims:
        own = weights.replace(f"weight_{dim}", f"slope_{dim}")
        moved += [
            f'    moved_{dim}_0 = Einsum <equation = "nc{dims},nc{pixels},{at}->n{dims}"> (dy, x, {own})',
            f"    moved_{dim} = Unsqueeze (moved_{dim}_0, last)",
        ]
    lines = "\n".join(moved)
    return f"""
GridSample{suffix}Grad (places, {rows}, dy) => (dx)
{{
{_weights(dims)}
    dx = Einsum <equation = "nc{dims},{at}->nc{pixels}"> (dy, {weights})
}}

GridSample{suffix}PlacesGrad (places, x, {rows}, dy) => (dplaces)
{{
{_weights(dims, slopes=True)}
    last = Constant <value_ints = [-1]> ()
{lines}
    dplaces = Concat <axis = -1> ({", ".join(f"moved_{dim}" for dim in reversed(dims))})
}}
"""


SAMPLING = "".join(map(_gradients, _DIMS))
