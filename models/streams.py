"""Blocks of two streams, text and image, that attend together (Esser et al. 2024, Stable Diffusion 3, section 4).

Each stream has projections and an MLP of its own, modulated by the step of the noise. Weights are called as in
diffusers. Dims: B batch, S sequence, d model width.
"""

from collections.abc import Callable, Mapping
from typing import Literal

from autopar.models import diffusion, layers
from autopar.models.builder import Builder

Stream = Literal["text", "image"]

IMAGE = ("to_q", "to_k", "to_v", "norm_q", "norm_k")
_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")
_PROJECTIONS: Mapping[Stream, tuple[str, ...]] = {"text": _TEXT, "image": IMAGE}
_OUT: Mapping[Stream, tuple[str, str]] = {"text": ("to_add_out", "ff_context"), "image": ("to_out.0", "ff")}
"""Output projection and MLP of each stream."""


class Streams:
    """Writes blocks of two streams.

    Args:
        g: The graph.
        hidden: Model width.
        heads: Attention heads.
        lengths: Elements of either stream.
        moment_Bd: Activated features of the step and of what else modulates.
        normed: Whether queries and keys are normalised, each head by itself.
        turned: Turns queries and keys of the joined sequence by their places, given them and a prefix of names.
    """

    def __init__(
        self,
        g: Builder,
        hidden: int,
        heads: int,
        lengths: Mapping[Stream, int],
        moment_Bd: str,
        *,
        normed: bool,
        turned: Callable[[str, str, str], tuple[str, str]] = lambda q, k, name: (q, k),
    ) -> None:
        self.g, self.hidden, self.num_heads, self.lengths, self.moment = g, hidden, heads, lengths, moment_Bd
        self._normed, self._turned = normed, turned

    def modulation(self, name: str, weight: str, count: int) -> list[str]:
        """Return shifts, scales and gates [B, 1, d] of a block or of the head."""
        found = []
        for number in range(count):
            part = diffusion.linear(
                self.g, self.moment, f"{name}.{number}", weight, self.hidden, self.hidden, part=f".{number}"
            )
            found.append(diffusion.column(self.g, part, f"{name}.{number}.column"))
        return found

    def heads(self, x: str, name: str, weights: str, names: tuple[str, ...], seq: int) -> list[str]:
        """Return queries, keys and values; `names` are those of projections, then of the norms of queries and keys."""
        g, hidden, count = self.g, self.hidden, self.num_heads
        found = []
        for which, projection in zip("qkv", names[:3], strict=True):
            flat = diffusion.linear(g, x, f"{name}.{which}", f"{weights}.{projection}", hidden, hidden)
            found.append(layers.split_heads(g, flat, f"{name}.{which}", seq, count, hidden // count))
        for index, norm in enumerate(names[3:] if self._normed else ()):
            found[index] = diffusion.rms_norm(
                g, found[index], f"{name}.{'qk'[index]}_norm", f"{weights}.{norm}", hidden // count
            )
        return found

    def attended(self, q: str, k: str, v: str, name: str) -> str:
        """Return attention of the joined sequence [B, S, d]."""
        q, k = self._turned(q, k, name)
        return diffusion.attend(self.g, q, k, v, f"{name}.core", sum(self.lengths.values()), self.hidden)

    def block(self, text: str, image: str, index: int, *, last: bool = False, dual: bool = False) -> tuple[str, str]:
        """Return both streams behind a block.

        Args:
            text: The text [B, T, d].
            image: The patches [B, N, d].
            index: Number of the block.
            last: Whether only the image leaves the block.
            dual: Whether the image also attends to itself (Stable Diffusion 3.5).
        """
        g, hidden, name, weights = self.g, self.hidden, f"layers.{index}", f"transformer_blocks.{index}"
        streams: dict[Stream, str] = {"text": text, "image": image}
        changes: dict[Stream, list[str]] = {
            "text": self.modulation(f"{name}.text.mod", f"{weights}.norm1_context.linear", 2 if last else 6),
            "image": self.modulation(f"{name}.image.mod", f"{weights}.norm1.linear", 9 if dual else 6),
        }
        if last:
            changes["text"].reverse()  # here the scale comes before the shift
        parts = []
        for stream, names in _PROJECTIONS.items():
            shift, scale = changes[stream][:2]
            own = f"{name}.{stream}"
            normed = diffusion.modulated(g, streams[stream], f"{own}.attn_in", hidden, shift, scale)
            parts.append(self.heads(normed, f"{own}.attn", f"{weights}.attn", names, self.lengths[stream]))
        q, k, v = (
            g.op("Concat", *pair, name=f"{name}.attn.{which}.joined", axis=2)
            for which, pair in zip("qkv", zip(*parts, strict=True), strict=True)
        )
        y, first = self.attended(q, k, v, f"{name}.attn"), 0
        for stream, length in self.lengths.items():
            ends = g.constant((first,)), g.constant((first + length,)), g.constant((1,))
            first += length
            if last and stream == "text":
                continue
            mine = g.op("Slice", y, *ends, name=f"{name}.{stream}.attn.part")
            streams[stream] = self._behind(mine, streams[stream], stream, f"{name}.{stream}", weights, changes[stream])
        return streams["text"], streams["image"]

    def _behind(self, mine: str, x: str, stream: Stream, own: str, weights: str, changes: list[str]) -> str:
        """Return a stream behind a block, given what attention made of it and what modulates it."""
        g, hidden, (out, fed) = self.g, self.hidden, _OUT[stream]
        _, _, gate, shift, scale, gate_mlp, *again = changes
        mine = diffusion.linear(g, mine, f"{own}.attn.out", f"{weights}.attn.{out}", hidden, hidden)
        behind = diffusion.gated(g, x, f"{own}.attn_residual", mine, gate)
        if again:
            shift_again, scale_again, gate_again = again
            normed = diffusion.modulated(g, x, f"{own}.dual_in", hidden, shift_again, scale_again)
            length = self.lengths[stream]
            q, k, v = self.heads(normed, f"{own}.dual", f"{weights}.attn2", IMAGE, length)
            y = diffusion.attend(g, q, k, v, f"{own}.dual.core", length, hidden)
            y = diffusion.linear(g, y, f"{own}.dual.out", f"{weights}.attn2.to_out.0", hidden, hidden)
            behind = diffusion.gated(g, behind, f"{own}.dual_residual", y, gate_again)
        normed = diffusion.modulated(g, behind, f"{own}.mlp_in", hidden, shift, scale)
        y = diffusion.feed_forward(g, normed, f"{own}.mlp", f"{weights}.{fed}", hidden, 4 * hidden)
        return diffusion.gated(g, behind, f"{own}.mlp_residual", y, gate_mlp)
