"""PyTorch: a plan as DTensor placements, with a script that applies them to a module."""

import json

from autopar.folding.fold import Folded
from autopar.frameworks.buckets import in_pytorch
from autopar.frameworks.header import Remarks, header
from autopar.frameworks.jax import NOT_PREDICTED, common_losses
from autopar.frameworks.placements import has_chunks, input_placements, parameter_placements
from autopar.frameworks.regions import compiled_regions
from autopar.ir.graph import SEPARATED
from autopar.plan import Exported, Plan
from autopar.sharding import Placements, Shard

TRANSPOSED = ".T"
"""End of the name of a parameter that an exporter has turned round: PyTorch keeps [out, in], the graph [in, out]."""

_SCRIPT = '''import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

STAGES = {groups}  # groups of devices of the pipeline
SHAPE = {shape}
AXES = {axes}

# Shape, and one placement per mesh axis: a number is the dim that is split, None a copy.
PARAMETERS = {{
{parameters}}}

INPUTS = {{
{inputs}}}

# Groups of devices that read a parameter; those not listed are read by all.
GROUPS_OF = {{
{groups_of}}}

COMPILED = {compiled}  # modules whose ops share kernels in the plan


def mesh(device_type="cuda"):
    """Return the mesh of the group of devices that this process belongs to."""
    if STAGES == 1:
        return init_device_mesh(device_type, SHAPE, mesh_dim_names=AXES)
    return init_device_mesh(device_type, (STAGES, *SHAPE), mesh_dim_names=("pp", *AXES))[AXES]


def group():
    """Return the number of the group of devices that this process belongs to."""
    size = 1
    for axis in SHAPE:
        size *= axis
    return torch.distributed.get_rank() // size


def placements(entries):
    """Return DTensor placements, one per mesh axis."""
    return [Replicate() if dim is None else Shard(dim) for dim in entries]


def distribute(module, device_mesh):
    """Turn the parameters of a module into DTensors laid out as the plan says; names and shapes have to be those here.

    A parameter that another group of devices reads is left as it is.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    missing = sorted(set(PARAMETERS) - set(named))
    if missing:
        raise KeyError(f"the module has no parameter {{missing[0]!r}}; the plan was made for another one")
    made = {{}}
    for name, (shape, entries) in PARAMETERS.items():
        if group() not in GROUPS_OF.get(name, (group(),)):
            continue
        parameter = named[name]
        if tuple(parameter.shape) != shape:
            raise ValueError(f"{{name}} has shape {{tuple(parameter.shape)}}, the plan was made for {{shape}}")
        if id(parameter) not in made:
            placed = distribute_tensor(parameter.data, device_mesh, placements(entries))
            made[id(parameter)] = torch.nn.Parameter(placed, requires_grad=parameter.requires_grad)
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, made[id(parameter)])
    for part in module.modules():
        if isinstance(part, torch.nn.Embedding):
            part.register_forward_hook(reduced)
    return module


def compile_regions(module):
    """Compile the modules whose ops share kernels, each as a region of its own."""
    for name in COMPILED:
        module.get_submodule(name).compile()
    return module


def reduced(part, arguments, output):
    """Sum up what the rows of a split embedding gave, at once: DTensor can do it only once."""
    if not isinstance(output, DTensor):
        return output
    return output.redistribute(placements=[Replicate() if p.is_partial() else p for p in output.placements])


def distribute_input(name, value, device_mesh):
    """Return data of a whole microbatch, the same on every process, as a DTensor laid out as the plan says."""
    return distribute_tensor(value, device_mesh, placements(INPUTS[name][1]))
'''


def export(plan: Plan, folded: Folded) -> Exported:
    """Return a plan as a Python file with DTensor placements."""
    parameters = parameter_placements(plan, folded)
    lost: list[str] = []
    chunked = [item.value.name for item in parameters if has_chunks(item.stored)]
    if chunked:
        lost.append(
            f"{len(chunked)} parameters are sharded in chunks (such as {chunked[0]}, a fused projection); DTensor "
            "splits them in one piece, and moves data where their parts are used"
        )
    whole_of: dict[str, str] = json.loads(folded.graph.metadata.get(SEPARATED, "{}"))
    parts = [item.value.name for item in parameters if item.value.name in whole_of]
    if parts:
        lost.append(
            f"{len(parts)} entries are parts of a fused parameter (such as {parts[0]}, of {whole_of[parts[0]]}): give "
            "each part a parameter of its own in the module"
        )
    zero = [item.value.name for item in parameters if item.update != item.stored]
    if zero:
        lost.append(
            f"ZeRO: the optimizer state of {len(zero)} parameters lies otherwise than the parameter; use fully_shard "
            "or ZeroRedundancyOptimizer"
        )
    devices = sorted({stage.devices for stage in plan.stages})
    if len(plan.stages) > 1:
        lost.append(
            f"the pipeline ({len(plan.stages)} stages, {plan.schedule}, {plan.num_microbatches} microbatches): cut the "
            "module with torch.distributed.pipelining, blocks "
            + ", ".join(f"{stage.blocks[0]} to {stage.blocks[1] - 1}" for stage in plan.stages)
        )
    elif plan.num_microbatches > 1:
        counts = " or ".join(str(share.num_microbatches) for share in plan.shares) or plan.num_microbatches
        lost.append(f"gradient accumulation over {counts} microbatches")
    lost += common_losses(plan)
    regions = compiled_regions(plan, folded)
    lost += [*in_pytorch(plan, folded), *regions.lost]
    values = folded.graph.values
    group_of = {stage: devices.index(plan.stages[stage].devices) for stage in range(len(plan.stages))}

    def line(name: str, shape: tuple[int, ...], placed: Placements) -> str:
        entries = tuple(placement.dim if isinstance(placement, Shard) else None for placement in placed)
        if name.endswith(TRANSPOSED):
            name, shape = name.removesuffix(TRANSPOSED), shape[::-1]
            entries = tuple(None if dim is None else len(shape) - 1 - dim for dim in entries)
        return f"    {name!r}: ({shape}, {entries}),\n"

    text = header(plan, "DTensor placements for PyTorch", Remarks(lost, outcome=NOT_PREDICTED)) + _SCRIPT.format(
        groups=len(devices),
        shape=plan.device_mesh.shape,
        axes=tuple(axis.name for axis in plan.mesh),
        parameters="".join(line(item.value.name, item.value.shape, item.stored) for item in parameters),
        inputs="".join(
            line(name, values[name].shape, placed) for name, placed in input_placements(plan, folded).items()
        ),
        compiled=list(regions.modules),
        groups_of="".join(
            f"    {item.value.name.removesuffix(TRANSPOSED)!r}: {tuple(sorted({group_of[s] for s in item.stages}))},\n"
            for item in parameters
            if len(devices) > 1
        ),
    )
    return Exported("placements_torch.py", text.encode(), tuple(lost))
