"""Rotary position embeddings (Su et al. 2021) and the scalings that stretch them to longer contexts.

Dim pair `i` of a head with `D` rotated dims turns by `position * frequency_i`; without scaling
`frequency_i = theta ** (-2 i / D)`. A scaling changes the frequencies and may multiply the tables.
"""

from dataclasses import dataclass, replace
from math import log, pi
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Scaling = Literal["default", "linear", "llama3", "yarn", "longrope"]
"""Names of the scalings as Hugging Face configurations spell them."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Places of the patches of an image or video, by frame, row and column, and of what stands beside it in a sequence.

    Attributes:
        height: Patches from top to bottom.
        width: Patches from left to right.
        coordinates: Of each pair of dims, the coordinate that it turns by: 0 for the frame, 1 for the row, 2 for the
            column.
        block: Side of the squares of patches that follow each other; 1 for rows.
        first: Row and column of the first patch.
        then_text: Whether text follows, placed behind the farthest row or column; else what follows is not turned.
        axial: Whether rows and columns have the same frequencies, those of half the dims.
        skipped: Elements of the sequence before the image, which are not turned.
        frames: Images of a video, one after the other.
        window: Side of the windows, in patches, whose squares follow each other; 0 without windows.
    """

    height: int
    width: int
    coordinates: tuple[int, ...]
    block: int = 1
    first: int = 0
    then_text: bool = False
    axial: bool = False
    skipped: int = 0
    frames: int = 1
    window: int = 0

    def coordinates_of(self) -> NDArray[np.int64]:
        """Return row and column of each patch in the order of the sequence: (patches, 2)."""
        window, block = self.window or self.height, self.block
        across = self.window or self.width
        shape = (
            self.height // window, window // block, block, self.width // across, across // block, block
        )  # fmt: skip
        sides = np.indices((self.height, self.width)).reshape(2, *shape)
        found: NDArray[np.int64] = sides.transpose(0, 1, 4, 2, 5, 3, 6).reshape(2, -1).T
        return found

    def positions(self, seq: int) -> NDArray[np.float64]:
        """Return the position that each pair of dims of each element of a sequence turns by: (seq, pairs)."""
        image = self.coordinates_of() + self.first
        whole = np.zeros((seq, 3))
        end = self.skipped + self.frames * len(image)
        whole[self.skipped : end, 0] = np.repeat(np.arange(self.frames), len(image))
        whole[self.skipped : end, 1:] = np.tile(image, (self.frames, 1))
        if self.then_text:
            whole[end:] = (max(self.height, self.width) + np.arange(seq - end))[:, None]
        return whole[:, list(self.coordinates)]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of one kind of attention.

    Attributes:
        theta: Base of the frequencies.
        size: Rotated dims of a head, an even number.
        scaling: How the frequencies are stretched.
        factor: Ratio of the stretched context to the original one.
        original: Tokens of the original context.
        low: `llama3`: wavelengths above `original / low` are stretched whole. `yarn`: rotations in the original
            context below which a dim is interpolated whole (`beta_slow`).
        high: `llama3`: wavelengths below `original / high` are kept. `yarn`: rotations above which a dim is kept
            (`beta_fast`).
        truncate: `yarn`: whether the limits of the ramp are whole dims.
        factors: `longrope`: a divisor per frequency.
        amplitude: What the tables are multiplied by.
        grid: Places of an image's patches; None for places in a sequence.
        first: Position of the first element of a sequence.
    """

    theta: float
    size: int
    scaling: Scaling = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    amplitude: float = 1.0
    grid: Grid | None = None
    first: int = 0

    def positions(self, seq: int) -> NDArray[np.float64]:
        """Return the position of each element of a sequence, for each pair of dims or for all: (seq, pairs or 1)."""
        return self.first + np.arange(float(seq))[:, None] if self.grid is None else self.grid.positions(seq)

    def frequencies(self) -> NDArray[np.float64]:
        """Return the angle in radians that a position turns each pair of dims by: (size / 2,).

        Sources: linear: Chen et al. 2023 (position interpolation); llama3: Grattafiori et al. 2024 and the released
        code; yarn: Peng et al. 2023, section 3; longrope: Ding et al. 2024.
        """
        if self.grid is not None and self.grid.axial:
            of_side = replace(self, size=self.size // 2, grid=None).frequencies()
            return np.concatenate([of_side, of_side])
        plain: NDArray[np.float64] = self.theta ** (-np.arange(0, self.size, 2) / self.size)
        match self.scaling:
            case "default":
                return plain
            case "linear":
                return plain / np.float64(self.factor)
            case "llama3":
                turns = self.original * plain / (2 * pi)  # rotations within the original context
                return self._blended(plain, np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0))
            case "yarn":
                first, last = self._pair_of(self.high), self._pair_of(self.low)
                if self.truncate:
                    first, last = np.floor(first), np.ceil(last)
                first, last = max(first, 0.0), min(last, self.size - 1.0)
                ramp = (np.arange(self.size // 2) - first) / max(last - first, 1e-3)
                return self._blended(plain, 1.0 - np.clip(ramp, 0.0, 1.0))
            case "longrope":
                return plain / np.array(self.factors, np.float64)

    def _blended(self, plain: NDArray[np.float64], kept: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return frequencies of which a share `kept` is as without scaling, and the rest divided by the factor."""
        blended: NDArray[np.float64] = kept * plain + (1 - kept) * plain / self.factor
        return blended

    def _pair_of(self, turns: float) -> float:
        """Return the pair of dims, a real number, that makes so many rotations within the original context."""
        return self.size * log(self.original / (2 * pi * turns)) / (2 * log(self.theta))


def yarn_amplitude(factor: float, mscale: float = 1.0) -> float:
    """Return what YaRN multiplies the tables by: `0.1 mscale ln(factor) + 1` (Peng et al. 2023, section 3.4)."""
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0


def longrope_amplitude(factor: float, original: int) -> float:
    """Return what LongRoPE multiplies the tables by: `sqrt(1 + ln(factor) / ln(original))` (Ding et al. 2024)."""
    return (1.0 + log(factor) / log(original)) ** 0.5 if factor > 1 else 1.0
