"""Jobs to compare on, listed in a YAML file, one entry per job.

- model: zoo:llama3-8b
  gpus: 64
  cluster: h100
- {model: model.onnx, gpus: 8, global_batch: 64, dims: {seq: 512}, memory_limit: 40.0}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autopar.errors import JobError
from autopar.plan import DimSize
from autopar.reading import UnreadableError, parse_yaml


class BenchJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job of a list.

    Attributes:
        model: Path of an ONNX file, `zoo:NAME` or `hf:PATH`.
        gpus: Number of devices.
        cluster: Preset name or YAML file.
        mode: "train" or "infer".
        global_batch: Samples per step; None for the model's own.
        dims: Dynamic dims by name.
        memory_limit: 1e9 bytes per device a plan may use; None for most of the device's memory.
    """

    model: str
    gpus: int
    cluster: str = "h100"
    mode: str = "train"
    global_batch: int | None = None
    dims: Mapping[str, DimSize] = {}
    memory_limit: float | None = None

    def stated(self) -> dict[str, Any]:
        """Return the fields of a `JobRequest` that the job states."""
        stated: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__}
        if self.memory_limit is not None:
            stated["memory_limit"] = self.memory_limit * 1e9
        return {name: value for name, value in stated.items() if value not in (None, {})}


def load_jobs(path: Path) -> tuple[BenchJob, ...]:
    """Return the jobs of a list.

    Raises:
        JobError: If the file cannot be read, is no list of jobs, or lists none.
    """
    try:
        found = msgspec.convert(parse_yaml(path.read_text(encoding="utf-8")), list[BenchJob])
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}", hint="--jobs takes a YAML file") from None
    except (UnreadableError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise JobError(f"{path}: {error}", hint="a job is `- {model: zoo:gpt2, gpus: 8, cluster: h100}`") from None
    if not found:
        raise JobError(f"{path} lists no job", hint="a job is `- {model: zoo:gpt2, gpus: 8, cluster: h100}`")
    return tuple(found)
