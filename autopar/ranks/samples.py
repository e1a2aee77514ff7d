"""What a run is held against where each device normalises its own samples: a step by accumulation of gradients.

With the statistics of each device (`autopar.training.batch_norm`) a step whose microbatches lie on n devices computes
what one device computes on n times as many microbatches of an n-th of the samples. So the step on one device is run on
these parts, and their losses are added. So it is where rows of devices have different shares of the microbatches: a
part is what one row has of a microbatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import JobError
from autopar.ir.graph import Graph
from autopar.program.listing import part_counts
from autopar.program.records import Program
from autopar.ranks.unpartitioned import Unpartitioned
from autopar.shares import num_rows, of_row

Array = NDArray[Any]


def num_parts(program: Program, graph: Graph) -> int:
    """Return into how many parts devices that normalise on their own, or rows, cut a microbatch; 1 if none does.

    Args:
        program: The program.
        graph: The graph of one microbatch.

    Raises:
        JobError: If ops differ in that, so that no step on one device computes the same.
    """
    found = part_counts(program, graph)
    if len(found) > 1:
        numbers = ", ".join(map(str, sorted(found)))
        raise JobError(
            f"layers normalise microbatches in different numbers of parts ({numbers}): nothing to compare with",
            hint="solve with --sync-batchnorm, or pin the axes that shard the batch",
        )
    return max(found, default=1)


def cut(data: Mapping[str, Array], graph: Graph, parts: int) -> list[dict[str, Array]]:
    """Return the data of a microbatch in parts of equal numbers of samples.

    Args:
        data: By input.
        graph: The graph of one part.
        parts: How many.
    """
    whole = {name for name, array in data.items() if array.shape == graph.values[name].shape}
    return [
        {name: x if name in whole else np.split(x, parts)[part] for name, x in data.items()} for part in range(parts)
    ]


def has_part(program: Program, part: int, parts: int, microbatch: int) -> bool:
    """Return whether a part of a microbatch is part of the step: its row may have fewer microbatches than others."""
    if not program.shares:
        return True
    row = part * num_rows(program.shares) // parts
    return microbatch < of_row(program.shares, row).num_microbatches


def joined(found: Unpartitioned, microbatches: Sequence[int]) -> Unpartitioned:
    """Return the results of a step with the losses of the parts of each microbatch added.

    Args:
        found: Results of a step whose microbatches are parts.
        microbatches: Of which microbatch each is a part.
    """
    if len(set(microbatches)) == len(microbatches):
        return found
    outputs: dict[tuple[int, str], Array] = {}
    for (index, name), array in found.outputs.items():
        key = microbatches[index], name
        outputs[key] = outputs[key] + array if key in outputs else array
    return replace(found, outputs=outputs)
