"""The table of gradients: which rule differentiates which kind of op, and which kinds have no gradient.

A VJP (vector-Jacobian product) turns the gradient of the loss with respect to an op's outputs into that with respect to
its inputs.
"""

from collections.abc import Mapping

from autopar.training.rules.attention import ATTENTION
from autopar.training.rules.base import Rule
from autopar.training.rules.convolution import CONVOLUTION
from autopar.training.rules.elementwise import ELEMENTWISE
from autopar.training.rules.experts import EXPERTS
from autopar.training.rules.images import IMAGES
from autopar.training.rules.linear import LINEAR
from autopar.training.rules.normalization import NORMALIZATION
from autopar.training.rules.recurrent import RECURRENT
from autopar.training.rules.reductions import REDUCTIONS
from autopar.training.rules.scans import SCANS
from autopar.training.rules.scatter import SCATTER
from autopar.training.rules.shapes import SHAPES

VJPS: Mapping[str, Rule] = {
    **ELEMENTWISE,
    **SHAPES,
    **SCATTER,
    **REDUCTIONS,
    **LINEAR,
    **ATTENTION,
    **NORMALIZATION,
    **CONVOLUTION,
    **EXPERTS,
    **IMAGES,
    **RECURRENT,
    **SCANS,
}
"""The rule of every differentiable kind."""

CONSTANT_KINDS: frozenset[str] = frozenset(
    {
        "And", "ArgMax", "ArgMin", "Bernoulli", "Ceil", "Constant", "ConstantOfShape", "Equal", "EyeLike", "Floor",
        "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Multinomial", "NonZero",
        "Not", "OneHot", "Or", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Range",
        "Round", "Shape", "Sign", "Size", "Xor",
    }
)  # fmt: skip
"""Kinds whose outputs do not change with their inputs, or only in jumps: no gradient passes through them."""
