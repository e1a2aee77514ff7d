"""Operations of one training step, counted as Megatron-LM does: what its TFLOP/s times its seconds come to.

Per token of a sequence of s, in products of two operations each, and three times that for a step
(`num_floating_point_operations` in megatron/training/training.py, NVIDIA/Megatron-LM):

    attention, grouped   h d (2 a + 2 g) + a d s                              causal: half of the s^2 scores
    attention, latent    h q + q a (n + r) + h (l + r) + l a (n + v) + a v h + a (n + r + v) s / 2
    MLP                  3 h f gated, 2 h f not
    experts              3 h (k e + shared width)
    head                 h V

h width, a heads, g heads of keys, d size of a head, f width of the MLP, k experts per token of width e; q and l latent
widths of queries and of keys and values, n and r plain and rotated part of a key, v size of a value.
"""

from autopar.models.published_decoders import PublishedConfig
from autopar.models.spec import Config

_NOT_GATED = "nemotron4"
"""Models whose MLP has two matrices."""
_NOT_COUNTED = ("llama4", "gpt-oss", "gemma", "whisper", "t5", "flan")
"""Models with windows, with experts in some layers only, or with an encoder."""


def step_flops(config: Config, global_batch: int, mtp_layers: int = 0) -> float | None:
    """Return the operations of a step; None for models whose layers the formula does not count.

    Args:
        config: The model.
        global_batch: Sequences of a step.
        mtp_layers: Layers that predict further tokens, each with a head of its own and a projection of 2 h to h.
    """
    if not isinstance(config, PublishedConfig) or config.model.startswith(_NOT_COUNTED) or config.scan_heads:
        return None
    hidden, layers = config.hidden, config.num_layers + mtp_layers
    dense = layers if not config.experts else config.dense_layers
    expert = config.expert_ffn or config.ffn
    width = config.top_k * expert + (config.shared * expert or config.shared_ffn)
    matrices = 2 if config.model.startswith(_NOT_GATED) else 3
    per_token = layers * _attention(config) + matrices * hidden * (dense * config.ffn + (layers - dense) * width)
    per_token += (1 + mtp_layers) * hidden * config.vocab + 2 * mtp_layers * hidden**2
    return 3.0 * 2.0 * per_token * config.seq * global_batch


def _attention(config: PublishedConfig) -> float:
    hidden, heads, seq = config.hidden, config.heads, config.seq
    if config.latent_rank:
        key = config.plain + config.rotated
        queries = (
            hidden * config.query_rank + config.query_rank * heads * key if config.query_rank else hidden * heads * key
        )
        latent = hidden * (config.latent_rank + config.rotated) + config.latent_rank * heads * (
            config.plain + config.value
        )
        return queries + latent + heads * config.value * hidden + heads * (key + config.value) * seq / 2
    size = config.head or hidden // heads
    return hidden * size * (2 * heads + 2 * (config.kv_heads or heads)) + heads * size * seq
