"""Executors whose kernels do on some shards what kernels should not."""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar.execute import Executor
from autopar.ir.graph import Attr

Array = NDArray[Any]
Where = Literal["everywhere", "rows of 2", "rows on 3 devices"]


def _loop() -> None:
    while True:
        pass


def _hoard() -> None:
    np.empty(6 << 30, np.uint8)  # nobody writes to it: where it is granted it costs nothing


FAULTS: Mapping[str, Callable[[], object]] = {
    "segmentation fault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(4),
    "loop": _loop,
    "sleep": lambda: time.sleep(3600),
    "memory": _hoard,
}


class Faulty(Executor):
    """An executor with a fault in the kernels of one kind."""

    def __init__(self, fault: str, kind: str = "Softplus", where: Where = "rows of 2") -> None:
        super().__init__()
        self._fault = FAULTS[fault]
        self._kind = kind
        self._where = where

    def run_kind(
        self,
        kind: str,
        attrs: tuple[tuple[str, Attr], ...],
        inputs: Sequence[Array | None],
        num_outputs: int,
        opset: int,
        name: str = "",
    ) -> tuple[Array, ...]:
        """Run an op, or into the fault."""
        if kind == self._kind and any(array is not None and self._hits(array) for array in inputs):
            self._fault()
        return super().run_kind(kind, attrs, inputs, num_outputs, opset, name)

    def _hits(self, array: Array) -> bool:
        rows = array.shape[0] if array.ndim else 0
        match self._where:
            case "everywhere":
                return True
            case "rows of 2":  # half of 4, the smallest even proxy, or a third of 6
                return rows == 2
            case "rows on 3 devices":  # the triple proxy is 6 x 9
                return rows == 2 and array.shape[1:] == (9,)
