"""Decoders and encoder-decoders of the zoo that are built from the configuration they were published with.

Each entry is the part of its `config.json` that makes the model, read by `architectures`. Sizes can be changed under
the names they have in the rest of the zoo.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from autopar.errors import ModelError
from autopar.models.architectures import build_architecture, read_architecture
from autopar.models.config_fields import Unbuilt
from autopar.models.decoder_config import DecoderConfig
from autopar.models.decoder_settings import with_settings
from autopar.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnx

_LLAMA3 = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}  # fmt: skip
_QWEN3_MOE = {
    **_QWEN3, "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}  # fmt: skip
_YARN40 = {
    "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "max_position_embeddings": 163840, "rope_theta": 10000,
}  # fmt: skip
_DEEPSEEK_V3 = {
    **_LATENT, "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "vocab_size": 129280, "rope_scaling": _YARN40,
}  # fmt: skip
_DEEPSEEK_V2 = {
    **_LATENT, "model_type": "deepseek_v2", "vocab_size": 102400, "num_experts_per_tok": 6, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "rope_scaling": {**_YARN40, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
_GLM = {
    "model_type": "glm4_moe", "vocab_size": 151552, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "partial_rotary_factor": 0.5, "attention_bias": True, "rope_theta": 1e6, "max_position_embeddings": 131072,
}  # fmt: skip
_WHISPER_LARGE = {
    "model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32,
    "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120,
    "max_source_positions": 1500,
}  # fmt: skip
_NEMOTRON = {
    "model_type": "nemotron", "vocab_size": 256000, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
    "hidden_act": "relu2", "max_position_embeddings": 4096,
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
    "sliding_window": 128, "swiglu_limit": 7.0, "rope_theta": 150000, "attention_bias": True,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
_LLAMA4 = {
    "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
    "head_dim": 128, "attention_chunk_size": 8192, "rope_theta": 5e5, "num_experts_per_tok": 1,
}  # fmt: skip
_GEMMA2 = {
    "model_type": "gemma2", "vocab_size": 256000, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "max_position_embeddings": 8192,
}  # fmt: skip
_GEMMA3 = {
    "model_type": "gemma3_text", "vocab_size": 262208, "sliding_window": 1024, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "max_position_embeddings": 131072,
}  # fmt: skip
_NEMOTRON_H = {
    "model_type": "nemotron_h", "vocab_size": 131072, "num_key_value_heads": 8, "head_dim": 128, "mamba_head_dim": 64,
    "n_groups": 8, "conv_kernel": 4, "mlp_hidden_act": "relu2",
}  # fmt: skip
_JAMBA = {
    "model_type": "jamba", "vocab_size": 65536, "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2,
    "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
_FIVE_PAIRS = "M-M-M-M-M*-"
"""Five blocks of each kind and an attention, the period of Nemotron-H."""

CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "llama3.1-8b": {
        **_LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama3.1-70b": {
        **_LLAMA3, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "llama3.1-405b": {
        **_LLAMA3, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "qwen3-8b": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    },
    "qwen3-14b": {
        **_QWEN3, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
    },
    "qwen3-32b": {
        **_QWEN3, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": {
        **_QWEN3_MOE, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "qwen3-235b-a22b": {
        **_QWEN3_MOE, "hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "deepseek-v2-lite": {
        **_DEEPSEEK_V2, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None, "n_routed_experts": 64,
        "topk_method": "greedy",
    },
    "deepseek-v2": {
        **_DEEPSEEK_V2, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 60, "num_attention_heads": 128, "n_routed_experts": 160, "n_group": 8, "topk_group": 3,
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
    },
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": {
        **_DEEPSEEK_V3, "model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "vocab_size": 163840,
        "rope_theta": 50000, "rope_scaling": {**_YARN40, "factor": 32}, "max_position_embeddings": 131072,
    },
    "glm-4.5": {
        **_GLM, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 92, "n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True,
        "routed_scaling_factor": 2.5,
    },
    "glm-4.5-air": {
        **_GLM, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 46, "n_routed_experts": 128, "first_k_dense_replace": 1, "use_qk_norm": False,
        "routed_scaling_factor": 1.0,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "bloom-176b": {
        "model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880,
    },
    "grok-1": {
        "model_type": "grok-1", "vocab_size": 131072, "hidden_size": 6144, "intermediate_size": 32768,
        "num_hidden_layers": 64, "num_attention_heads": 48, "num_key_value_heads": 8, "num_experts": 8,
        "num_experts_per_tok": 2, "attn_output_multiplier": 0.08838834764831845, "max_attn_value": 30.0,
        "embedding_multiplier_scale": 78.38367176906169, "output_multiplier_scale": 0.5773502691896257,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "llama4-scout": {**_LLAMA4, "num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True},
    "llama4-maverick": {**_LLAMA4, "num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False},
    "gemma2-9b": {
        **_GEMMA2, "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256,
    },
    "gemma2-27b": {
        **_GEMMA2, "hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144,
    },
    "gemma3-12b": {
        **_GEMMA3, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256,
    },
    "gemma3-27b": {
        **_GEMMA3, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
    },
    "nemotron4-15b": {
        **_NEMOTRON, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 32,
        "num_attention_heads": 48,
    },
    "nemotron4-340b": {
        **_NEMOTRON, "hidden_size": 18432, "intermediate_size": 73728, "num_hidden_layers": 96,
        "num_attention_heads": 96,
    },
    "mamba2-2.7b": {
        "model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50288, "num_heads": 80,
        "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2, "conv_kernel": 4, "tie_word_embeddings": True,
    },
    "mamba-2.8b": {
        "model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280, "state_size": 16,
        "expand": 2, "conv_kernel": 4,
    },
    "falcon-mamba-7b": {
        "model_type": "falcon_mamba", "hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 65024,
        "state_size": 16, "expand": 2, "conv_kernel": 4, "tie_word_embeddings": False,
    },
    "jamba-v0.1": {
        **_JAMBA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "jamba-1.5-large": {
        **_JAMBA, "hidden_size": 8192, "intermediate_size": 24576, "num_hidden_layers": 72, "num_attention_heads": 64,
    },
    "bamba-9b": {
        "model_type": "bamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "attn_layer_indices": [9, 18, 27],
        "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "nemotron-h-8b": {
        **_NEMOTRON_H, "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 52,
        "num_attention_heads": 32, "mamba_num_heads": 128, "ssm_state_size": 128,
        "hybrid_override_pattern": f"M-M-M-M*-{3 * _FIVE_PAIRS}M-M-M-M-M-",
    },
    "nemotron-h-56b": {
        **_NEMOTRON_H, "hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 118,
        "num_attention_heads": 64, "mamba_num_heads": 256, "ssm_state_size": 256,
        "hybrid_override_pattern": f"M-M-M-M*-{9 * _FIVE_PAIRS}M-M-M-M-M-",
    },
    "nemotron3-nano-30b-a3b": {
        **_NEMOTRON_H, "hidden_size": 2688, "intermediate_size": 1856, "num_hidden_layers": 52,
        "num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 64, "ssm_state_size": 128,
        "hybrid_override_pattern": f"MEMEM*{4 * 'EMEMEM*'}EMEMEMEM*EMEMEMEME", "n_routed_experts": 128,
        "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
    },
    "qwen3-next-80b-a3b": {
        **_QWEN3_MOE, "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
        "num_experts_per_tok": 10, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4, "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "max_position_embeddings": 262144,
    },
    "t5-11b": {
        "model_type": "t5", "d_model": 1024, "d_ff": 65536, "d_kv": 128, "num_heads": 128, "num_layers": 24,
        "vocab_size": 32128,
    },
    "flan-t5-xxl": {
        "model_type": "t5", "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24,
        "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    },
    "whisper-large": {**_WHISPER_LARGE, "vocab_size": 51865, "num_mel_bins": 80},
    "whisper-large-v3": {**_WHISPER_LARGE, "vocab_size": 51866, "num_mel_bins": 128},
}  # fmt: skip
"""Fields of published configurations by name in the zoo."""

_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "expert_ffn": "moe_intermediate_size",
    "top_k": "num_experts_per_tok",
    "shared": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "groups": "n_group",
    "chosen_groups": "topk_group",
    "query_rank": "q_lora_rank",
    "latent_rank": "kv_lora_rank",
    "plain": "qk_nope_head_dim",
    "rotated": "qk_rope_head_dim",
    "value": "v_head_dim",
}
"""Sizes of decoders by their name in the zoo, and the field of a configuration."""
_OTHER_KEYS: Mapping[str, tuple[str, ...]] = {
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "shared_ffn": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "scan_heads": ("num_heads", "mamba_num_heads", "mamba_n_heads", "linear_num_value_heads"),
    "scan_head": ("mamba_head_dim", "mamba_d_head", "linear_value_head_dim"),
    "scan_groups": ("n_groups", "mamba_n_groups", "linear_num_key_heads"),
    "state": ("state_size", "ssm_state_size", "mamba_d_state", "linear_key_head_dim"),
}
"""Sizes of decoders by their name in the zoo, and the fields of which a configuration has one."""
_PATTERN = "hybrid_override_pattern"
"""Field that states the kind of each block by a letter."""
_BOTH = ("encoder", "decoder")
_KEYS_OF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "t5": {
        "num_layers": ("num_layers",), "hidden": ("d_model",), "heads": ("num_heads",), "head": ("d_kv",),
        "ffn": ("d_ff",), "vocab": ("vocab_size",),
    },
    "bloom": {
        "num_layers": ("n_layer",), "hidden": ("n_embed",), "heads": ("num_attention_heads",), "vocab": ("vocab_size",),
    },
    "whisper": {
        "num_layers": tuple(f"{side}_layers" for side in _BOTH), "hidden": ("d_model",),
        "heads": tuple(f"{side}_attention_heads" for side in _BOTH),
        "ffn": tuple(f"{side}_ffn_dim" for side in _BOTH), "vocab": ("vocab_size",),
        "frames": ("max_source_positions",),
    },
}  # fmt: skip
"""Sizes of other families, whose encoder and decoder may have a field each."""


_SIZES = (*_KEYS, *_OTHER_KEYS, "frames")


def _size() -> Any:
    return field(default=0, metadata={"least": 0})


@dataclass(frozen=True, slots=True)
class PublishedConfig:
    """Sizes of a published model; 0 where it has no such size.

    Attributes:
        model: Name of the published configuration.
        seq: Tokens per sequence.
        num_layers: Blocks; of an encoder-decoder on either side.
        hidden: Model width.
        heads: Query heads.
        kv_heads: Key and value heads.
        head: Elements of a head.
        ffn: Width of the MLP.
        vocab: Tokens in the vocabulary.
        experts: Routed experts per layer.
        top_k: Routed experts of a token.
        expert_ffn: Width of an expert.
        shared: Experts that every token uses.
        dense_layers: Blocks before the first with experts.
        groups: Groups of experts.
        chosen_groups: Groups that a token may choose experts of.
        query_rank: Latent width of queries.
        latent_rank: Latent width of keys and values.
        plain: Elements of a head's query and key that are not rotated, of latent attention.
        rotated: Those that are.
        value: Elements of a head's value.
        shared_ffn: Width of what every token uses beside experts.
        scan_heads: Heads of a scan.
        scan_head: Elements of such a head.
        scan_groups: Groups of heads of a scan that share keys.
        state: Numbers of state per element of a head of a scan.
        frames: Length of the sequence that an encoder makes of sound.
        docs_per_sequence: Documents that share a sequence, of equal length, and do not see each other.
        expert_imbalance: Tokens of the fullest device, relative to an even load of experts.
        mtp: Further tokens that are predicted in training, each by a module that is one more block.
        cached: Tokens before those of a sequence, whose keys and values lie in caches: a step of decoding.
    """

    model: str
    seq: int
    num_layers: int
    hidden: int = _size()
    heads: int = _size()
    kv_heads: int = _size()
    head: int = _size()
    ffn: int = _size()
    vocab: int = _size()
    experts: int = _size()
    top_k: int = _size()
    expert_ffn: int = _size()
    shared: int = _size()
    dense_layers: int = _size()
    groups: int = _size()
    chosen_groups: int = _size()
    query_rank: int = _size()
    latent_rank: int = _size()
    plain: int = _size()
    rotated: int = _size()
    value: int = _size()
    shared_ffn: int = _size()
    scan_heads: int = _size()
    scan_head: int = _size()
    scan_groups: int = _size()
    state: int = _size()
    frames: int = _size()
    docs_per_sequence: int = 1
    expert_imbalance: float = 1.0
    mtp: int = _size()
    cached: int = _size()

    def __post_init__(self) -> None:
        if self.model not in CONFIGURATIONS:
            raise ModelError(
                f"there is no published configuration {self.model!r}", hint=f"choose {', '.join(CONFIGURATIONS)}"
            )
        published = _sizes(CONFIGURATIONS[self.model])
        for item in fields(self):
            size = getattr(self, item.name)
            if item.name in _SIZES and bool(size) != bool(published.get(item.name)):
                known = published.get(item.name)
                raise ModelError(
                    f"{self.model} has {item.name}={known}, which cannot be 0" if known
                    else f"{self.model} has no {item.name}",
                    hint=f"its sizes are {', '.join(f'{name}={value}' for name, value in published.items() if value)}",
                )  # fmt: skip

    @property
    def sample_size(self) -> int:
        """Tokens per sequence."""
        return self.seq

    @property
    def configuration(self) -> dict[str, Any]:
        """The fields of the `config.json`, with the sizes of this one."""
        published = dict(CONFIGURATIONS[self.model])
        for name, keys in _keys(published).items():
            if getattr(self, name):
                published.update(dict.fromkeys(keys, getattr(self, name)))
        if _PATTERN in published:
            if self.num_layers > len(published[_PATTERN]):
                raise ModelError(
                    f"{self.model} has a pattern of {len(published[_PATTERN])} blocks, not of {self.num_layers}",
                    hint=f"num_layers is at most {len(published[_PATTERN])}",
                )
            published[_PATTERN] = published[_PATTERN][: self.num_layers]
        return published


def _keys(configuration: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
    """Return the fields that state each size a configuration may have, by its name in the zoo."""
    known = _KEYS_OF.get(configuration["model_type"])
    if known is not None:
        return known
    stated = {name: tuple(key for key in keys if key in configuration)[:1] for name, keys in _OTHER_KEYS.items()}
    return {**{name: (key,) for name, key in _KEYS.items()}, **{name: keys for name, keys in stated.items() if keys}}


def _sizes(configuration: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a configuration by their name in the zoo; those it does not state are left out."""
    return {name: configuration[of[0]] for name, of in _keys(configuration).items() if configuration.get(of[0])}


def build(name: str, config: PublishedConfig) -> "onnx.ModelProto":
    """Return the graph of a published model (`decoder.build`, `encoder_decoder.build`).

    Raises:
        ModelError: If the sizes make no model, or it has no packed sequences or experts to set anything of.
    """
    native = read_architecture(config.configuration, config.cached + config.seq)
    assert not isinstance(native, Unbuilt), f"{config.model} is a published configuration of a known family"
    if isinstance(native, DecoderConfig):
        native = with_settings(native, config.docs_per_sequence, config.expert_imbalance, config.mtp, config.cached)
    elif (config.docs_per_sequence, config.expert_imbalance, config.mtp, config.cached) != (1, 1.0, 0, 0):
        raise ModelError(
            f"{config.model} has no packed sequences, no experts, no multi-token prediction and no caches",
            hint="leave docs_per_sequence, expert_imbalance, mtp and cached out",
        )
    return build_architecture(name, native)


def _spec(name: str, count: int, batch: int, seq: int, source: str) -> ModelSpec:
    config = PublishedConfig(name, seq, **_sizes(CONFIGURATIONS[name]))
    return ModelSpec(name, "published", count, batch, "sequence", source, config)


# Counts are without buffers of the router and without modules of multi-token prediction; where an exact count of the
# released checkpoint was published they equal it. Batches: 16M tokens for Llama 3.1 405B, 15360 sequences for
# DeepSeek-V3 (section 4.2), 9216 for DeepSeek-V2 (section 3.1.2), 67M tokens for Kimi K2 (section 2.5), 2304 sequences
# for Nemotron-4 340B, 768 for Nemotron-H, 3072 for Nemotron 3 Nano, 1M tokens for Mamba 2, 2048 sequences for T5
# (section 3.7), 256 segments of sound for Whisper (Table 17); 4M tokens where none was published. Whisper's count is
# without the 1,920,000 fixed positions of its encoder.
SPECS = (
    _spec("llama3.1-8b", 8_030_261_248, 512, 8192, "meta-llama/Llama-3.1-8B"),
    _spec("llama3.1-70b", 70_553_706_496, 512, 8192, "meta-llama/Llama-3.1-70B"),
    _spec("llama3.1-405b", 405_853_388_800, 2048, 8192, "meta-llama/Llama-3.1-405B"),
    _spec("qwen3-8b", 8_190_735_360, 1024, 4096, "Qwen/Qwen3-8B"),
    _spec("qwen3-14b", 14_768_307_200, 1024, 4096, "Qwen/Qwen3-14B"),
    _spec("qwen3-32b", 32_762_123_264, 1024, 4096, "Qwen/Qwen3-32B"),
    _spec("qwen3-30b-a3b", 30_532_122_624, 1024, 4096, "Qwen/Qwen3-30B-A3B"),
    _spec("qwen3-235b-a22b", 235_093_634_560, 1024, 4096, "Qwen/Qwen3-235B-A22B"),
    _spec("deepseek-v2-lite", 15_706_484_224, 1024, 4096, "deepseek-ai/DeepSeek-V2-Lite"),
    _spec("deepseek-v2", 235_741_434_880, 9216, 4096, "deepseek-ai/DeepSeek-V2"),
    _spec("deepseek-v3", 671_026_404_352, 15360, 4096, "deepseek-ai/DeepSeek-V3"),
    _spec("kimi-k2", 1_026_408_209_408, 16384, 4096, "moonshotai/Kimi-K2-Instruct"),
    _spec("glm-4.5", 352_797_814_784, 1024, 4096, "zai-org/GLM-4.5"),
    _spec("glm-4.5-air", 106_852_245_504, 1024, 4096, "zai-org/GLM-4.5-Air"),
    _spec("gpt-oss-20b", 20_914_757_184, 1024, 4096, "openai/gpt-oss-20b"),
    _spec("gpt-oss-120b", 116_829_156_672, 1024, 4096, "openai/gpt-oss-120b"),
    _spec("bloom-176b", 176_247_271_424, 2048, 2048, "bigscience/bloom; Le Scao et al. 2022, Table 3"),
    _spec("grok-1", 315_684_820_992, 512, 8192, "xai-org/grok-1, run.py"),
    _spec("llama4-scout", 107_769_861_120, 1024, 4096, "meta-llama/Llama-4-Scout-17B-16E, without its vision tower"),
    _spec(
        "llama4-maverick", 400_711_848_960, 1024, 4096, "meta-llama/Llama-4-Maverick-17B-128E, without its vision tower"
    ),
    _spec("gemma2-9b", 9_241_705_984, 1024, 4096, "google/gemma-2-9b"),
    _spec("gemma2-27b", 27_227_128_320, 1024, 4096, "google/gemma-2-27b"),
    _spec("gemma3-12b", 11_766_034_176, 1024, 4096, "google/gemma-3-12b-pt, without its vision tower"),
    _spec("gemma3-27b", 27_009_346_304, 1024, 4096, "google/gemma-3-27b-pt, without its vision tower"),
    _spec("nemotron4-15b", 15_628_775_424, 1024, 4096, "Parmar et al. 2024 (Nemotron-4 15B), Table 1"),
    _spec("mamba2-2.7b", 2_702_599_680, 512, 2048, "state-spaces/mamba2-2.7b"),
    _spec("mamba-2.8b", 2_768_345_600, 512, 2048, "state-spaces/mamba-2.8b"),
    _spec("falcon-mamba-7b", 7_272_665_088, 2048, 8192, "tiiuae/falcon-mamba-7b"),
    _spec("jamba-v0.1", 51_570_323_328, 1024, 4096, "ai21labs/Jamba-v0.1"),
    _spec("jamba-1.5-large", 398_555_145_696, 1024, 4096, "ai21labs/AI21-Jamba-1.5-Large"),
    _spec("bamba-9b", 9_780_235_392, 1024, 4096, "ibm-ai-platform/Bamba-9B"),
    _spec("nemotron-h-8b", 8_100_852_736, 768, 8192, "nvidia/Nemotron-H-8B-Base-8K"),
    _spec("nemotron-h-56b", 56_324_350_464, 768, 8192, "nvidia/Nemotron-H-56B-Base-8K"),
    _spec("nemotron3-nano-30b-a3b", 31_577_937_344, 3072, 8192, "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16"),
    _spec("qwen3-next-80b-a3b", 79_674_391_296, 1024, 4096, "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    _spec("nemotron4-340b", 341_029_195_776, 2304, 4096, "nvidia/Nemotron-4-340B-Base"),
    _spec("t5-11b", 11_307_321_344, 2048, 512, "google-t5/t5-11b; Raffel et al. 2020"),
    _spec("flan-t5-xxl", 11_135_332_352, 2048, 512, "google/flan-t5-xxl"),
    _spec("whisper-large", 1_541_384_960, 256, 448, "openai/whisper-large-v2; Radford et al. 2022"),
    _spec("whisper-large-v3", 1_541_570_560, 256, 448, "openai/whisper-large-v3"),
)
"""All models."""
