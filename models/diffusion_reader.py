"""Configurations of diffusers: transformers of images and videos, by the class that they name.

Sizes of images, videos and texts are no part of such a configuration: they are those of the zoo, unless `image_size`,
`frames`, `height`, `width` or `tokens`, fields of our own, state others.
"""

from collections.abc import Callable, Mapping

from autopar.models.config_fields import Fields, UnknownError
from autopar.models.dit import DitConfig
from autopar.models.flux import FluxConfig
from autopar.models.sd3 import Sd3Config
from autopar.models.wan import WanConfig

_PATCH = [1, 2, 2]
"""Frames, rows and columns of a patch of Wan."""


def _flux(fields: Fields, seq: int) -> FluxConfig:
    heads, size = fields.size("num_attention_heads", default=24), fields.size("attention_head_dim", default=128)
    channels = fields.size("in_channels", default=64)
    axes = fields.get("axes_dims_rope", default=[16, 56, 56])
    if channels % 4 or fields.get("out_channels", default=channels) != channels or fields.get("patch_size") not in _ONE:
        raise UnknownError(f"in_channels={channels} that are not 2 x 2 pixels of as many channels as come out")
    if not isinstance(axes, list) or len(axes) != 3 or not all(type(axis) is int and axis > 0 for axis in axes):
        raise UnknownError(f"axes_dims_rope={axes!r}")
    found = FluxConfig(
        fields.size("num_layers", default=19), fields.size("num_single_layers", default=38), heads * size, heads,
        (axes[0], axes[1], axes[2]), channels // 4, fields.size("image_size", default=128),
        fields.size("tokens", default=512), fields.size("joint_attention_dim", default=4096),
        fields.size("pooled_projection_dim", default=768), fields.flag("guidance_embeds", False),
    )  # fmt: skip
    _check_all_read(fields)
    return found


_ONE = (None, 1)


def _wan(fields: Fields, seq: int) -> WanConfig:
    heads, size = fields.size("num_attention_heads", default=40), fields.size("attention_head_dim", default=128)
    channels = fields.size("in_channels", default=16)
    for name, known in (
        ("patch_size", _PATCH), ("out_channels", channels), ("freq_dim", 256), ("cross_attn_norm", True),
        ("qk_norm", "rms_norm_across_heads"), ("eps", 1e-6), ("image_dim", None), ("added_kv_proj_dim", None),
        ("pos_embed_seq_len", None),
    ):  # fmt: skip
        if fields.get(name, default=known) != known:
            raise UnknownError(f"{name}={fields.get(name)!r}")
    found = WanConfig(
        fields.size("num_layers", default=40), heads * size, heads, fields.size("ffn_dim", default=13824), channels,
        fields.size("frames", default=21), fields.size("height", default=60), fields.size("width", default=104),
        fields.size("tokens", default=512), fields.size("text_dim", default=4096),
    )  # fmt: skip
    longest = fields.size("rope_max_seq_len", default=1024)
    if max(found.frames, found.height // 2, found.width // 2) > longest:
        raise UnknownError(f"rope_max_seq_len={longest}, fewer than the patches of a side")
    _check_all_read(fields)
    return found


def _dit(fields: Fields, seq: int) -> DitConfig:
    heads, size = fields.size("num_attention_heads", default=16), fields.size("attention_head_dim", default=72)
    for name, known in (
        ("patch_size", 2), ("attention_bias", True), ("activation_fn", "gelu-approximate"),
        ("norm_type", "ada_norm_zero"), ("norm_elementwise_affine", False), ("norm_eps", 1e-5),
        ("upcast_attention", False),
    ):  # fmt: skip
        if fields.get(name, default=known) != known:
            raise UnknownError(f"{name}={fields.get(name)!r}")
    for name in ("norm_num_groups", "dropout"):  # of no norm, and of training alone
        fields.get(name)
    channels = fields.size("in_channels", default=4)
    found = DitConfig(
        fields.size("num_layers", default=28), heads * size, heads,
        fields.size("image_size", "sample_size", default=32), channels, fields.size("out_channels", default=channels),
        fields.size("num_embeds_ada_norm", default=1000), shared=False,
    )  # fmt: skip
    _check_all_read(fields)
    return found


def _sd3(fields: Fields, seq: int) -> Sd3Config:
    heads, size = fields.size("num_attention_heads", default=18), fields.size("attention_head_dim", default=64)
    channels, norm = fields.size("in_channels", default=16), fields.get("qk_norm")
    dual = fields.get("dual_attention_layers", default=[])
    for name, known in (
        ("patch_size", 2), ("out_channels", channels), ("caption_projection_dim", heads * size)
    ):  # fmt: skip
        if fields.get(name, default=known) != known:
            raise UnknownError(f"{name}={fields.get(name)!r}")
    if norm not in (None, "rms_norm"):
        raise UnknownError(f"qk_norm={norm!r}")
    if not isinstance(dual, list | tuple) or list(dual) != list(range(len(dual))):
        raise UnknownError(f"dual_attention_layers={dual!r}")
    base = fields.size("sample_size", default=128)
    found = Sd3Config(
        fields.size("num_layers", default=18), heads * size, heads, len(dual), norm is not None, channels,
        fields.size("image_size", default=base), base, fields.size("pos_embed_max_size", default=96),
        fields.size("tokens", default=333), fields.size("joint_attention_dim", default=4096),
        fields.size("pooled_projection_dim", default=2048),
    )  # fmt: skip
    _check_all_read(fields)
    return found


def _check_all_read(fields: Fields) -> None:
    """Check that the configuration has no field that the builder does not know.

    Raises:
        UnknownError: If it has one.
    """
    for name, value in fields.values.items():
        if name not in fields.taken and not name.startswith("_") and name != "model_type" and value is not None:
            raise UnknownError(f"{name}={value!r}")


DIFFUSION: Mapping[str, Callable[[Fields, int], DitConfig | FluxConfig | Sd3Config | WanConfig]] = {
    "DiTTransformer2DModel": _dit,
    "FluxTransformer2DModel": _flux,
    "SD3Transformer2DModel": _sd3,
    "WanTransformer3DModel": _wan,
}
"""Reader of each `_class_name`, which stands for a `model_type`."""
