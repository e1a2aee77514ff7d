"""What is plainly wrong with a request, said before planning is imported, which takes seconds of processor time."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.cluster import Cluster

_MAX_BYTES = 1 << 26
"""Size of a model file up to which it is read twice, once here: hundredths of a second."""


def check_request(model: str, dims: Mapping[str, int | float], *clusters: "str | Cluster") -> None:
    """Check that a model and clusters are there, and that the model can be read.

    Args:
        model: Path of an ONNX file, `zoo:NAME` or `hf:PATH`.
        dims: What `--set` says.
        clusters: Names of presets, or paths of YAML files; records have been checked.

    Raises:
        ModelError: If there is no such model, or its file cannot be read, or dims are not bound.
        ClusterError: If there is no such cluster, or its file is wrong.
    """
    if names := [cluster for cluster in clusters if isinstance(cluster, str)]:
        from autopar.cluster import load_cluster

        for name in names:
            load_cluster(name)
    if model.startswith("zoo:"):
        from autopar import models

        models.spec(model.removeprefix("zoo:"))
    elif model.startswith("hf:"):
        from autopar.huggingface import read_config

        read_config(model.removeprefix("hf:"))
    elif not (path := Path(model)).exists():
        from autopar import models

        raise models.missing_model(model)
    elif not path.is_file() or path.stat().st_size <= _MAX_BYTES:
        from autopar.onnx.batch import bind
        from autopar.onnx.reader import read

        bind(read(path), dims, 1)  # dim 0 of the inputs is for the planner to choose
