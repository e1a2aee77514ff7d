"""JAX: a plan as a Python file with a `PartitionSpec` per tensor."""

from collections.abc import Iterable

from autopar.folding.fold import Folded
from autopar.frameworks.buckets import one_size
from autopar.frameworks.facts import offloads_lost
from autopar.frameworks.header import Remarks, header
from autopar.frameworks.placements import (
    boundary_placements,
    check_even,
    has_chunks,
    input_placements,
    parameter_placements,
)
from autopar.plan import Exported, Plan
from autopar.sharding import Axis, Partial, Placements, Shard

_SCRIPT = '''import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

STAGES = {stages}  # devices of every stage, from and to
SHAPE = {shape}
AXES = {axes}

INPUTS = {{
{inputs}}}

# Parameters between steps.
PARAMETERS = {{
{parameters}}}

# State of the optimizer, and gradients when it reads them, where they lie otherwise than the parameter (ZeRO).
OPTIMIZER = PARAMETERS | {{
{optimizer}}}

# Values between blocks, by the name they have in one block of each kind.
BETWEEN_BLOCKS = {{
{boundaries}}}

STAGES_OF = {{
{stages_of}}}


def mesh(stage=0, devices=None):
    """Return the mesh of a stage."""
    first, last = STAGES[stage]
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices[first:last]).reshape(SHAPE), AXES)


def sharding(name, stage=0, devices=None):
    """Return the sharding of a parameter or an input."""
    return NamedSharding(mesh(stage, devices), PARAMETERS.get(name, INPUTS.get(name)))


def shard(parameters, stage=0, devices=None):
    """Return a dict of parameters by name, laid out as the plan says; those of other stages are left out."""
    unknown = sorted(set(parameters) - set(PARAMETERS))
    if unknown:
        raise KeyError(f"the plan knows no parameter {{unknown[0]!r}}")
    return {{
        name: jax.device_put(value, sharding(name, stage, devices))
        for name, value in parameters.items()
        if stage in STAGES_OF.get(name, (stage,))
    }}
'''


def export(plan: Plan, folded: Folded) -> Exported:
    """Return a plan as a Python file with a `PartitionSpec` per parameter, input and value between blocks.

    Raises:
        ExportError: If parameters lie in uneven blocks.
    """
    check_even(plan, "JAX")
    parameters = parameter_placements(plan, folded)
    inputs = input_placements(plan, folded)
    values = folded.graph.values
    lost: list[str] = []
    chunked = [item.value.name for item in parameters if has_chunks(item.stored) or has_chunks(item.update)]
    if chunked:
        lost.append(
            f"{len(chunked)} parameters are sharded in chunks (such as {chunked[0]}, a fused projection); a "
            "PartitionSpec splits them in one piece, so that the compiler moves data where their parts are used"
        )
    if len(plan.stages) > 1:
        lost.append(
            f"the pipeline ({len(plan.stages)} stages, {plan.schedule}, {plan.num_microbatches} microbatches): "
            "every stage has a mesh, cutting the model is yours"
        )
    elif plan.num_microbatches > 1:
        counts = " or ".join(str(share.num_microbatches) for share in plan.shares) or plan.num_microbatches
        lost.append(f"gradient accumulation over {counts} microbatches")
    lost += common_losses(plan)
    size = one_size(plan, folded, "jax")
    if size is not None:
        lost.append(size.lost)
    boundaries = []
    for name, (value, placements, instances) in boundary_placements(plan, folded).items():
        if any(isinstance(placement, Partial) for placement in placements):
            lost.append(f"{name} leaves its block as terms to be summed; it has no PartitionSpec")
            continue
        spec = partition_spec(placements, plan.mesh, len(value.shape))
        boundaries.append(f"    {name!r}: {spec},  # {_shape(value.shape)}, blocks {_ranges(instances)}\n")
    remarks = Remarks(lost, outcome=NOT_PREDICTED, environment=[] if size is None else [size.xla_flags])
    text = header(plan, "Shardings for JAX", remarks) + _SCRIPT.format(
        stages=[stage.devices for stage in plan.stages],
        shape=plan.device_mesh.shape,
        axes=tuple(axis.name for axis in plan.mesh),
        inputs="".join(
            f"    {name!r}: {partition_spec(placements, plan.mesh, len(values[name].shape))},"
            f"  # {_shape(values[name].shape)}\n"
            for name, placements in inputs.items()
        ),
        parameters="".join(
            f"    {item.value.name!r}: {partition_spec(item.stored, plan.mesh, len(item.value.shape))},"
            f"  # {_shape(item.value.shape)}\n"
            for item in parameters
        ),
        optimizer="".join(
            f"    {item.value.name!r}: {partition_spec(item.update, plan.mesh, len(item.value.shape))},\n"
            for item in parameters
            if item.update != item.stored
        ),
        boundaries="".join(boundaries),
        stages_of="".join(f"    {item.value.name!r}: {item.stages},\n" for item in parameters if len(plan.stages) > 1),
    )
    return Exported("shardings_jax.py", text.encode(), tuple(lost))


def partition_spec(placements: Placements, axes: tuple[Axis, ...], rank: int) -> str:
    """Return a `PartitionSpec` as Python text, written as `P(...)`.

    >>> partition_spec((Shard(1), Shard(1), Shard(0)), (Axis("a", 2, 4), Axis("b", 2, 2), Axis("c", 2, 1)), 3)
    "P('c', ('a', 'b'))"
    """
    dims: list[list[str]] = [[] for _ in range(rank)]
    for placement, axis in zip(placements, axes, strict=True):
        if isinstance(placement, Shard):
            dims[placement.dim].append(axis.name)
    entries = [repr(names[0]) if len(names) == 1 else repr(tuple(names)) if names else "None" for names in dims]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


NOT_PREDICTED = "Not predicted as written: the figures of the plan hold if all that is not expressed is done likewise."
"""What JAX and PyTorch make of placements is up to them."""


def common_losses(plan: Plan) -> list[str]:
    """Return what neither JAX nor PyTorch takes from placements of parameters."""
    lost = ["placements inside blocks: the compiler, or the dispatcher, chooses them from those of parameters and data"]
    flavours = {flavour for stage in plan.stages for flavour in stage.flavours} - {"offload"}
    lost += offloads_lost(plan)
    if len(flavours) > 1 or not flavours <= {"none"}:
        lost.append(f"recompute ({' and '.join(sorted(flavours - {'none'}))} in some or all blocks)")
    return lost


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def _ranges(numbers: tuple[int, ...]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
