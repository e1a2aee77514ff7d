"""Gradient, loss and optimizer kernels, causal attention, and ops on parts: functions of domain `autopar`.

Each has an ONNX body, the meaning of its kind: whoever cannot run the kernel natively runs the body. Each is costed as
one kernel.
Bodies are written to be run on shards: sizes come from the shapes of the inputs, and sums over a dim that may be split
are outputs of their own, so that the terms of the shards can be added. Where an output dim has no input to take its
size from (the vocabulary in the gradient of an embedding), the numbers of its rows are an input (`rows`, `classes`: 0,
1, 2, ...), so that a shard of the numbers gives the shard of the result.

Functions named `...Part` are run by devices in place of an op of the standard that would have to know where the block
of the device starts (`discover.rules.Local`).

Names: x input, y output, dy gradient of the loss with respect to y; capital letters behind `_` are dims.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from autopar.ir.bodies.attention import ATTENTION, CAUSAL_PARTS, HEADS_PARTS
from autopar.ir.bodies.causal_attention import CACHED_ATTENTION, CAUSAL_ATTENTION
from autopar.ir.bodies.convolution import CONVOLUTION, POOLING
from autopar.ir.bodies.elementwise import ELEMENTWISE
from autopar.ir.bodies.experts import EXPERTS
from autopar.ir.bodies.indexing import INDEXING, PARTS
from autopar.ir.bodies.normalization import NORMALIZATION
from autopar.ir.bodies.quantized import QUANTIZED
from autopar.ir.bodies.recurrent import RECURRENT
from autopar.ir.bodies.relative_attention import RELATIVE_ATTENTION
from autopar.ir.bodies.ring_attention import RING_ATTENTION
from autopar.ir.bodies.sampling import SAMPLING
from autopar.ir.bodies.scans import SCANS
from autopar.ir.bodies.steps import HEADS, LOSS, OPTIMIZERS

DOMAIN = "autopar"
OPSET = 24
"""Version of the default domain the bodies are written in."""


def _table(*sections: str) -> dict[str, str]:
    """Return the functions of all sections by kind; a closing brace at the start of a line ends one."""
    header = f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>\n'
    table = {}
    for section in sections:
        for text in section.split("\n}\n"):
            if text.strip():
                name = text.split(maxsplit=1)[0]
                table[f"{DOMAIN}::{name}"] = f"{header}{text.strip()}\n}}\n"
    return table


FUNCTIONS: Mapping[str, str] = _table(
    ELEMENTWISE,
    EXPERTS,
    NORMALIZATION,
    ATTENTION,
    CAUSAL_PARTS,
    HEADS_PARTS,
    CAUSAL_ATTENTION,
    CACHED_ATTENTION,
    RELATIVE_ATTENTION,
    RING_ATTENTION,
    INDEXING,
    PARTS,
    CONVOLUTION,
    POOLING,
    QUANTIZED,
    RECURRENT,
    SAMPLING,
    SCANS,
    LOSS,
    HEADS,
    OPTIMIZERS,
)
"""ONNX text (`onnx.parser` syntax) of every function by kind. Attributes without a default value are required."""


@cache
def function_proto(kind: str) -> Any:
    """Return the `onnx.FunctionProto` of a kind such as "autopar::Adam"; parsed once. Treat it as read-only.

    Raises:
        KeyError: If there is no such function.
    """
    from onnx import parser

    return parser.parse_function(FUNCTIONS[kind])
