"""Elements that lie in files beside the model: whether they are there, and exactly those that are asked for.

A model names such files itself, so that only plain files below its own folder are read (as the `onnx` package has it).
"""

import os
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from autopar.errors import ModelError


def is_external(tensor: TensorProto) -> bool:
    """Whether the elements lie in another file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def has_file(tensor: TensorProto, folder: Path | None) -> bool:
    """Whether there is a file where the elements should be."""
    location = _entry(tensor, "location")
    return folder is not None and bool(location) and os.path.isfile(folder / location)


def map_elements(tensor: TensorProto, folder: Path | None) -> NDArray[np.generic]:
    """Return the elements of a tensor, which are read from its file when they are looked at.

    Args:
        tensor: A tensor whose elements are external, of numbers of whole bytes.
        folder: The folder of the model; None if unknown.

    Raises:
        ModelError: If the file is not there, may not be read, or is too short.
    """
    path = _path(tensor, folder)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    shape = tuple(tensor.dims)
    offset, size = _number(tensor, "offset") or 0, prod(shape) * dtype.itemsize
    length = _number(tensor, "length")
    there = path.stat().st_size
    if (length is not None and length != size) or offset + size > there:
        given = "" if length is None else f" and a length of {length}"
        raise ModelError(
            f"tensor {tensor.name!r} has {size} bytes; its file {str(path)!r} has {there}, "
            f"with an offset of {offset}{given}",
            hint="copy the data file again, or export the model again",
        )
    if not size:
        return np.empty(shape, dtype)
    try:
        return np.memmap(path, dtype, "r", offset, shape)
    except OSError as error:
        raise ModelError(f"{str(path)!r}, data of tensor {tensor.name!r}, cannot be read: {error.strerror}") from error


def _path(tensor: TensorProto, folder: Path | None) -> Path:
    """Return the file of a tensor's elements.

    Raises:
        ModelError: If it is not a plain file below the folder.
    """
    location = _entry(tensor, "location")
    where = f"data of tensor {tensor.name!r}"
    if folder is None or not has_file(tensor, folder):
        raise ModelError(
            f"file {location!r}, {where}, is not there", hint="copy the data file into the folder of the model"
        )
    path = folder / location
    problem = _problem(path, folder, location)
    if problem:
        raise ModelError(
            f"file {str(path)!r}, {where}, {problem}, and is not read",
            hint="copy the data file itself into the folder of the model",
        )
    return path


def _problem(path: Path, folder: Path, location: str) -> str:
    """Return why a file may not be read; "" if it may."""
    if os.path.isabs(location):
        return "is given by an absolute path"
    if ".." in Path(location).parts:
        return "lies outside the folder of the model"
    if any((folder / part).is_symlink() for part in (Path(location), *Path(location).parents)[:-1]):
        return "is behind a symbolic link"
    return "is a hard link to another file" if path.stat().st_nlink > 1 else ""


def _entry(tensor: TensorProto, key: str) -> str:
    return next((str(entry.value) for entry in tensor.external_data if entry.key == key), "")


def _number(tensor: TensorProto, key: str) -> int | None:
    """Return a number of bytes that a tensor gives.

    Raises:
        ModelError: If it is not a whole number.
    """
    text = _entry(tensor, key)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ModelError(f"tensor {tensor.name!r} has {text[:40]!r} for the {key} of its data", hint="export it again")
    return int(text)
