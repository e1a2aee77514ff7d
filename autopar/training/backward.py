"""Reverse-mode differentiation of a graph.

Ops are visited from last to first; each turns the gradients of its outputs into those of its inputs by its rule in
`VJPS`. A value used several times has several gradients, which are added:

- those from one block are added in that block, as soon as its first user has been visited; so a block hands one
  gradient to the block before it, and all blocks of a chain have the same backward ops;
- sums from different blocks (skip connections, shared weights) are added in the block of the op that made the value,
  or, for a parameter, of its first user.
"""

from collections.abc import Callable, Iterable, Sequence

from autopar.errors import UnsupportedOpError
from autopar.ir.graph import Op, Phase
from autopar.training.rules.base import Grads
from autopar.training.tape import Tape, together, unsupported
from autopar.training.vjps import CONSTANT_KINDS, VJPS


def needed_values(tape: Tape, parameters: Iterable[str]) -> frozenset[str]:
    """Return the parameters and the float values computed from them, through ops that have a gradient."""
    needed = set(parameters)
    for op in tape.ops:
        if op.kind not in CONSTANT_KINDS and not needed.isdisjoint(op.inputs):
            needed.update(name for name in op.outputs if name and tape.values[name].is_float)
    return frozenset(needed)


class _Sums:
    """Collects the gradients of every value, block by block."""

    def __init__(self, tape: Tape, ops: Sequence[Op]) -> None:
        self._tape = tape
        self._terms: dict[str, dict[int, list[str]]] = {}
        self._giver: dict[tuple[str, int], Op] = {}
        self._first: dict[tuple[str, int], str] = {}
        for op in reversed(ops):
            for name in op.inputs:
                self._first[name, op.block] = op.name

    def give(self, value: str, grad: str, op: Op) -> None:
        """Add a gradient that an op of the forward pass sends to one of its inputs."""
        self._terms.setdefault(value, {}).setdefault(op.block, []).append(grad)
        self._giver[value, op.block] = op

    def close(self, op: Op) -> None:
        """Add up what this op's block sends to its inputs, as far as the op is their first user in the block."""
        for name in dict.fromkeys(op.inputs):
            if self._first[name, op.block] == op.name and op.block in self._terms.get(name, ()):
                self._add_block(name, op.block)

    def total(self, value: str, owner: Op) -> str | None:
        """Return the whole gradient of a value, None if it has none; a sum over blocks is written for `owner`."""
        blocks = self._terms.get(value)
        if blocks is None:
            return None
        for block in blocks:
            self._add_block(value, block)
        order = sorted(blocks)
        return self._add(value, [blocks[block][0] for block in order], owner)

    def _add_block(self, value: str, block: int) -> None:
        terms = self._terms[value][block]
        self._terms[value][block] = [self._add(value, terms, self._giver[value, block])]

    def _add(self, value: str, terms: list[str], owner: Op) -> str:
        """Return the sum of gradients, added in pairs."""
        if len(terms) == 1:
            return terms[0]
        tape = self._tape
        shape, dtype = tape.shape(value), tape.dtype(value)
        tape.write_for(Phase.BACKWARD, owner.block, stem=f"{owner.name}.sum", origin=owner.name)
        while len(terms) > 1:
            pairs = zip(terms[::2], terms[1::2], strict=False)
            odd = terms[-1:] if len(terms) % 2 else []
            terms = [tape.emit("Add", pair, shape, dtype) for pair in pairs] + odd
        return terms[0]


def backward(tape: Tape, ops: Sequence[Op], output: str, seed: str, finish: Callable[[str, str, int], None]) -> None:
    """Write the backward pass of `ops`.

    Args:
        tape: Where to write; its `needed` values get gradients.
        ops: The forward ops, in order; the last one makes `output`.
        output: The value to start from.
        seed: Its gradient.
        finish: Called with a parameter (a needed value no op makes), its gradient and its block, as soon as the
            gradient is complete.

    Raises:
        UnsupportedOpError: If a gradient must pass through ops without a rule; it names each kind of them.
    """
    sums = _Sums(tape, ops)
    missing: list[tuple[Op, UnsupportedOpError]] = []
    sums.give(output, seed, ops[-1])
    made = {name for op in ops for name in op.outputs}
    first_user = {name: op for op in reversed(ops) for name in op.inputs if name in tape.needed and name not in made}
    for op in reversed(ops):
        grads = [sums.total(name, op) if name in tape.needed else None for name in op.outputs]
        if any(grads):
            try:
                _differentiate(tape, op, grads, sums)
            except UnsupportedOpError as error:
                missing.append((op, error))
                _pass_zeros(tape, op, sums)
        for name in dict.fromkeys(op.inputs):
            grad = sums.total(name, op) if first_user.get(name) is op else None
            if grad is not None:
                finish(name, grad, op.block)
    if missing:
        raise together(missing[::-1])


def _pass_zeros(tape: Tape, op: Op, sums: _Sums) -> None:
    """Go on behind an op that cannot be differentiated, to find the others."""
    tape.write_for(Phase.BACKWARD, op.block, stem=f"{op.name}.vjp", origin=op.name)
    for name in dict.fromkeys(op.inputs):
        if name in tape.needed:
            sums.give(name, tape.zeros(tape.shape(name), tape.dtype(name)), op)
    sums.close(op)


def _differentiate(tape: Tape, op: Op, grads: Grads, sums: _Sums) -> None:
    """Apply an op's rule."""
    rule = VJPS.get(op.kind)
    if rule is None:
        raise unsupported(op, "its kind has no rule")
    tape.write_for(Phase.BACKWARD, op.block, stem=f"{op.name}.vjp", origin=op.name)
    for name, grad in zip(op.inputs, rule(tape, op, grads), strict=False):
        if grad is not None and name in tape.needed:
            assert tape.shape(grad) == tape.shape(name), f"gradient of {tape.values[name]} is {tape.values[grad]}"
            sums.give(name, grad, op)
    sums.close(op)
