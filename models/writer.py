"""Pieces of a transformer that all its parts are made of: projections, norms, nonlinearities, rotary positions.

Dims: B batch, S sequence, H heads, D head size, d model width.
"""

from autopar.models.builder import Builder
from autopar.models.decoder_config import TRANSPOSED, Activation, BlockStack
from autopar.models.rotary import Rope
from autopar.models.values import FIRST, grid_text


class Writer:
    """Writes pieces of one stack of blocks into a graph.

    Args:
        graph: The graph, or the name of a new one.
        config: The stack.
    """

    def __init__(self, graph: Builder | str, config: BlockStack) -> None:
        self.g = Builder(graph) if isinstance(graph, str) else graph
        self.config = config
        self._tables: dict[Rope, tuple[str, str]] = {}
        self._shape = ""
        self._ones = ""
        self._slopes: dict[tuple[float, ...], str] = {}

    def declare_tables(self, tokens: str, ropes: list[Rope], prefix: str = "") -> None:
        """Declare the rotary tables, one of each kind for all blocks.

        Args:
            tokens: What the batch is read from.
            ropes: Rotary positions of the blocks.
            prefix: What names of tables begin with.
        """
        for rope in dict.fromkeys(ropes):
            number = f".{len(self._tables)}" if self._tables else ""
            shape = (1, self.config.seq, rope.size // 2)
            values = f"{rope.amplitude!r}:" + ",".join(map(repr, rope.frequencies().tolist()))
            values += "" if rope.grid is None else f":{grid_text(rope.grid)}"
            values += f":{FIRST}{rope.first}" if rope.first else ""
            cos, sin = (
                self.g.buffer(f"{prefix}rope{number}.{part}", shape, f"angles-{part} {values}")
                for part in ("cos", "sin")
            )
            self._tables[rope] = cos, sin
            self._shape = self._shape or self.g.batch_shape(tokens, 3)

    def rotated(
        self, name: str, rope: Rope, size: int, values: dict[str, str], *, interleaved: bool = False
    ) -> list[str]:
        """Return values [B, H, S, D] turned by their positions.

        RotaryEmbedding takes tables [B, S, D/2]; they are broadcast in every block, so that no table travels between
        pipeline stages.

        Args:
            name: Prefix of all names.
            rope: The rotary positions.
            size: Elements of a head.
            values: What is turned, by name.
            interleaved: Whether neighbours are pairs.
        """
        g = self.g
        cos, sin = (
            g.op("Expand", table, self._shape, name=f"{name}.{part}")
            for part, table in zip(("cos", "sin"), self._tables[rope], strict=True)
        )
        attrs = {} if rope.size == size else {"rotary_embedding_dim": rope.size}
        attrs |= {"interleaved": 1} if interleaved else {}
        return [
            g.op("RotaryEmbedding", value, cos, sin, name=f"{name}.{part}.rotated", **attrs)
            for part, value in values.items()
        ]

    def distance_bias(self, slopes: tuple[float, ...]) -> str:
        """Return a table [H, 2 S - 1] of what scores are raised by, by distance of key and query from 1 - S on.

        There is one for all blocks.

        Args:
            slopes: What the scores of each head fall by per position.
        """
        if slopes not in self._slopes:
            number = f".{len(self._slopes)}" if self._slopes else ""
            shape = (len(slopes), 2 * self.config.seq - 1)
            table = self.g.buffer(f"alibi{number}", shape, f"distances {','.join(map(repr, slopes))}")
            self._slopes[slopes] = table
        return self._slopes[slopes]

    def linear(
        self,
        x: str,
        name: str,
        weight: str,
        num_in: int,
        num_out: int,
        *,
        bias: bool = False,
        part: str = "",
        transposed: bool = True,
    ) -> str:
        """Return `x @ weight [num_in, num_out] + bias`; `part` of the weight the checkpoint has under that name."""
        g = self.g
        end = TRANSPOSED if transposed else ""
        matrix = g.parameter(f"{weight}.weight{part}{end}", (num_in, num_out), f"normal {num_in**-0.5:.6g}")
        if not bias:
            return g.op("MatMul", x, matrix, name=name)
        product = g.op("MatMul", x, matrix, name=f"{name}.matmul")
        return g.op("Add", product, g.parameter(f"{weight}.bias{part}", (num_out,), "constant 0"), name=name)

    def norm(self, x: str, name: str, weight: str, width: int = 0) -> str:
        """Return `x` normalised over its last dim, of `width` elements or those of the model."""
        g, norm = self.g, self.config.norm
        shape = (width or self.config.hidden,)
        scale = g.parameter(f"{weight}.weight", shape, f"constant {0 if norm.from_zero else 1}")
        if norm.from_zero:
            scale = g.op("Add", scale, g.scales((1.0,)), name=f"{name}.scale")
        if norm.kind == "rms":
            return g.op("RMSNormalization", x, scale, name=name, axis=-1, epsilon=norm.epsilon)
        bias = (g.parameter(f"{weight}.bias", shape, "constant 0"),) if norm.bias else ()
        return g.op("LayerNormalization", x, scale, *bias, name=name, axis=-1, epsilon=norm.epsilon)

    def unit_norm(self, x: str, name: str, width: int) -> str:
        """Return `x` divided by its root mean square over its last dim, of `width` elements."""
        if not self._ones:
            self._ones = self.g.buffer("norm.ones", (width,), "constant 1")
        epsilon = self.config.norm.epsilon
        return self.g.op("RMSNormalization", x, self._ones, name=name, axis=-1, epsilon=epsilon)

    def activated(self, x: str, name: str, activation: Activation) -> str:
        """Return `x` behind a nonlinearity."""
        g = self.g
        match activation:
            case "silu":
                return g.op("Swish", x, name=f"{name}.swish")
            case "gelu":
                return g.op("Gelu", x, name=f"{name}.gelu", approximate="none")
            case "gelu-tanh":
                return g.op("Gelu", x, name=f"{name}.gelu", approximate="tanh")
            case "gelu-sigmoid":
                return g.op("Swish", x, name=f"{name}.swish", alpha=1.702)
            case "relu":
                return g.op("Relu", x, name=f"{name}.relu")
            case "relu-squared":
                positive = g.op("Relu", x, name=f"{name}.relu")
                return g.op("Mul", positive, positive, name=f"{name}.squared")

    def scaled(self, x: str, factor: float) -> str:
        """Return `x` times a number."""
        return x if factor == 1.0 else self.g.op("Mul", x, self.g.scales((factor,)), name=f"{x}.scaled")
