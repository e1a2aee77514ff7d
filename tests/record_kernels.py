"""Write the list of kernels that a search of usual models calls, `autopar/warming/kernels.json`.

    python tests/record_kernels.py

Plans the jobs below in this process, and lists the versions of all kernels that were called or loaded: modules in the
order of the seconds that their kernels take to compile, read from an empty cache.
"""

import json
import os
import sys
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

JOBS = (
    ("gpt2", {"gpus": 8}),
    ("mixtral-8x7b", {"gpus": 16, "dims": {"num_layers": 2}}),
)
"""Models and further arguments; kernels that only jobs short of memory call are left out, lest others wait."""


def spelled(kind: Any) -> object:
    """Return a numba type as `kernels.json` has it."""
    from numba import types

    if isinstance(kind, types.BaseNamedTuple):
        cls = kind.instance_class
        return {f"{cls.__module__}:{cls.__qualname__}": [spelled(field) for field in kind]}
    if isinstance(kind, types.Array):
        assert kind.layout == "C", kind
        return f"{'' if kind.mutable else 'const '}{kind.dtype}[{kind.ndim}]"
    return str(kind)


def main() -> None:
    """Plan the jobs and write the file."""
    from numba import types

    import autopar
    from autopar import warming
    from autopar.bench import usual_practice
    from autopar.compiled import KERNELS

    with mock.patch.object(warming, "listed", dict):  # the old list may have kernels that are others now
        for model, request in JOBS:
            rival = partial(usual_practice, seconds=5)
            autopar.solve(f"zoo:{model}", workers=1, cache_dir=None, time_limit=120, rival=rival, **request)
    found: dict[str, dict[str, list[list[object]]]] = defaultdict(dict)
    seconds: dict[str, float] = defaultdict(float)
    for name, kernel in KERNELS.items():
        module, _, function = name.partition(":")
        versions = [
            [spelled(kind) for kind in signature]
            for signature in kernel.signatures
            if not any(isinstance(kind, types.Literal) for kind in signature)  # compiled with their callers
        ]
        if versions:
            found[module][function] = versions
            times = ((kernel.get_metadata(each) or {}).get("timers", {}) for each in kernel.signatures)
            seconds[module] += sum(timers.get("compiler_lock", 0.0) for timers in times)
    text = json.dumps({module: found[module] for module in sorted(found, key=lambda own: -seconds[own])}, indent=1)
    (Path(__file__).parents[1] / "autopar" / "warming" / "kernels.json").write_text(text + "\n")


if __name__ == "__main__":
    if "NUMBA_CACHE_DIR" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:  # seconds of kernels that are loaded are not known
            os.environ["NUMBA_CACHE_DIR"] = folder
            os.execv(sys.executable, [sys.executable, *sys.argv])
    main()
