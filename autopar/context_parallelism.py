"""Kinds of context parallelism."""

from typing import Literal, get_args

ContextKind = Literal["ring", "gather", "ulysses"]
"""How attention gets at positions of a sequence that other devices hold: keys and values go round in a ring; every
device gathers them whole; or all devices exchange positions for heads (DeepSpeed-Ulysses)."""
CONTEXT_KINDS: tuple[ContextKind, ...] = get_args(ContextKind)

AttentionLimit = Literal["window", "chunk", "sinks", "mask"]
"""What attention may have that not all kernels for context parallelism know: a window or chunks that limit what a query
sees, logits of its own in the denominator of the softmax, or a mask that is an input."""
ATTENTION_LIMITS: tuple[AttentionLimit, ...] = get_args(AttentionLimit)
