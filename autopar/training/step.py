"""From a forward graph to a training step: forward, loss, backward, update."""

import json
from collections.abc import Mapping, Set
from dataclasses import replace

from autopar.errors import JobError
from autopar.ir.graph import FROZEN, Graph, Op, Phase, Role, State
from autopar.training.backward import backward, needed_values
from autopar.training.batch_norm import use_batch_statistics
from autopar.training.chunked_loss import CHUNKED, without_logits
from autopar.training.experts import check_experts
from autopar.training.fused_again import compute_again
from autopar.training.layer_weights import in_layers, product_weights
from autopar.training.losses import LOSS_SCALE, choose_loss
from autopar.training.optimizers import OPTIMIZERS, Moment, Optimizer
from autopar.training.tape import Tape

STEP = "optimizer.step"
"""Input of a step whose optimizer counts: number of the update, from 1, as a float scalar."""


def training_step(
    graph: Graph, *, loss: str = "auto", optimizer: str = "adam", sync_batchnorm: bool = True, fused: bool = False
) -> Graph:
    """Return the training step of a model for one microbatch.

    For each parameter p that the loss depends on and that is not frozen (`metadata`, see `autopar.onnx.load`), the
    gradient of the microbatch is added to buffer `p.grad`, giving `p.grad.sum`; the update op, which runs once per
    step, reads that sum. Backward ops have the block of the forward op they differentiate (their `origin`), update
    ops that of the parameter's first user. Ops that do not contribute to the loss are dropped; other parameters stay
    as they are.

    Args:
        graph: The forward graph. BatchNormalization is changed to use the statistics of the microbatch; running
            statistics stay as they are.
        loss: "auto" or a name in `LOSSES`. Cross-entropy reads input `labels` int64 with the logits' shape without the
            last dim, "mse" input `targets`.
        optimizer: A name in `OPTIMIZERS`.
        sync_batchnorm: Whether devices that share a batch normalise it with statistics of all of it, so that a
            partitioned step computes what the whole one does; else each device with those of its own samples.
        fused: Whether chains of element-wise ops are one kernel, whose backward computes again what it can
            (`compute_again`).

    Returns:
        The step; its only output is the loss. New states are gradient buffers and moments (`p.m`, `p.v`). `metadata`
        names the loss, the optimizer and the constant factor of the loss (`LOSS_SCALE`).

    Raises:
        ModelError: If it copies a matrix of weights for every token (`check_experts`).
        UnsupportedOpError: If a gradient must pass through an op that has no rule.
        JobError: If the loss or optimizer is unknown, the loss does not apply, or nothing is trained by it.
    """
    if optimizer not in OPTIMIZERS:
        raise JobError(f"there is no optimizer {optimizer!r}", hint=f"choose one of {', '.join(OPTIMIZERS)}")
    if any(op.phase is not Phase.FORWARD for op in graph.ops):
        raise JobError(f"{graph.name!r} is a training step already", hint="plan it with --mode infer, as it is")
    check_experts(graph)
    output, write_loss = choose_loss(graph, loss)
    graph = use_batch_statistics(_used_for(graph, output), synchronised=sync_batchnorm)
    frozen = set(json.loads(graph.metadata.get(FROZEN, "[]")))
    trained = [value.name for value in graph.parameters if value.is_float and value.name not in frozen]

    tape = Tape(graph)
    tape.needed = needed_values(tape, trained)
    if output not in tape.needed or not graph.ops:
        kept = f"; {len(frozen)} are frozen (requires_grad=False)" if frozen else ""
        raise JobError(
            f"output {output!r} of {graph.name!r} does not depend on any trained parameter{kept}",
            hint="plan it with --mode infer",
        )
    block = graph.ops[-1].block
    tape.write_for(Phase.LOSS, block, stem="loss")
    written = write_loss(tape, output)

    tape.write_for(Phase.BACKWARD, block, stem=f"{written.value}.vjp", origin=written.value)
    seed = written.backward()
    blocks: dict[str, int] = {}

    def accumulate(parameter: str, grad: str, block: int) -> None:
        value = tape.values[parameter]
        total = f"{parameter}.grad.sum"
        for name in (f"{parameter}.grad", total):
            tape.define(name, value.shape, value.dtype)
        tape.write_for(Phase.BACKWARD, block, stem=total, origin=parameter)
        tape.append("Add", [f"{parameter}.grad", grad], [total], total)
        blocks[parameter] = block

    backward(tape, graph.ops, output, seed, accumulate)
    matrices = in_layers(product_weights(graph).values())
    states, step_inputs = _update(tape, graph.states, blocks, optimizer, matrices)
    step = replace(
        graph,
        values=tape.values,
        inputs=tuple(dict.fromkeys((*graph.inputs, *written.inputs, *step_inputs))),
        states=states,
        constants=tape.constants,
        ops=tuple(tape.ops),
        outputs=(written.value,),
        metadata={
            **_with_batch_inputs(graph.metadata, written.inputs),
            "loss": written.value,
            "optimizer": optimizer,
            LOSS_SCALE: written.scale,
        },
    )
    if loss == CHUNKED:
        step = without_logits(step)
    return compute_again(step) if fused else step


def _with_batch_inputs(metadata: Mapping[str, str], inputs: tuple[str, ...]) -> dict[str, str]:
    """Return the metadata with the inputs of the loss added to the list of inputs whose dim 0 is the batch, if any."""
    if "batch_inputs" not in metadata:
        return dict(metadata)
    names = dict.fromkeys((*json.loads(metadata["batch_inputs"]), *inputs))
    return {**metadata, "batch_inputs": json.dumps(list(names))}


def _update(
    tape: Tape, states: tuple[State, ...], blocks: dict[str, int], optimizer: str, matrices: Set[str]
) -> tuple[tuple[State, ...], tuple[str, ...]]:
    """Write the update ops; return the states of the step and the inputs the updates read."""
    chosen = OPTIMIZERS[optimizer]
    methods = {
        parameter: chosen if chosen.takes(tape.values[parameter], matrices) else chosen.others for parameter in blocks
    }
    updated: list[State] = []
    added: list[State] = []
    counts = any(own is not None and own.counts for own in methods.values())
    count = [tape.define(tape.fresh(STEP), (), "float32")] if counts else []
    for state in states:
        parameter = state.input
        if parameter not in blocks:
            updated.append(state)
            continue
        method = methods[parameter]
        assert method is not None, "an optimizer trains every parameter, or names another one that does"
        moments = [f"{parameter}.{moment.suffix}" for moment in method.moments]
        for moment, name in zip(method.moments, moments, strict=True):
            tape.define(name, *moment.of(tape.values[parameter]))
        tape.write_for(Phase.UPDATE, blocks[parameter], stem=parameter, origin=parameter)
        _write_update(tape, parameter, method, *count)
        updated.append(replace(state, output=f"{parameter}.new"))
        added.append(State(f"{parameter}.grad", f"{parameter}.grad.sum", Role.GRADIENT, parameter))
        added += [State(moment, f"{moment}.new", Role.MOMENT, parameter) for moment in moments]
    return (*updated, *added), tuple(count)


def _write_update(tape: Tape, parameter: str, method: Optimizer, count: str = "") -> None:
    """Write the ops of the update of a parameter.

    Args:
        tape: Where to write.
        parameter: The parameter.
        method: Its optimizer.
        count: Number of the step.
    """
    value = tape.values[parameter]
    states = {"p", *(moment.suffix for moment in method.moments)}
    names = {"p": parameter, "g": f"{parameter}.grad.sum", "t": count}
    parts = method.update(value)
    for part in parts:
        outputs = []
        for made in part.makes:
            name = parameter if made.suffix == "p" else f"{parameter}.{made.suffix}"
            outputs.append(f"{name}.new" if made.suffix in states else name)
            tape.define(outputs[-1], *(Moment("").of(value) if made.suffix == "p" else made.of(value)))
        inputs = [names.get(read, f"{parameter}.{read}") for read in part.reads]
        name = f"{parameter}.update" if "p" in {made.suffix for made in part.makes} else f"{outputs[0]}.update"
        tape.append(part.kind, inputs, outputs, name, **method.attributes(part, value))


def _used_for(graph: Graph, output: str) -> Graph:
    """Return the graph with `output` as its only output and without the ops that do not contribute to it."""
    used = {output}
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if not used.isdisjoint(op.outputs):
            used.update(op.inputs)
            ops.append(op)
    made = {name for op in ops for name in op.outputs}
    kept = made | {name for name in graph.constants if name in used} | {state.input for state in graph.states}
    kept.update(graph.inputs)
    return replace(
        graph,
        values={name: value for name, value in graph.values.items() if name in kept},
        constants={name: array for name, array in graph.constants.items() if name in used},
        ops=tuple(reversed(ops)),
        outputs=(output,),
    )
