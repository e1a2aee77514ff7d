"""From a file to a model that can be walked node by node: read, checked, local functions inlined."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx.defs
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from autopar.errors import ModelError
from autopar.onnx.border import border
from autopar.onnx.functions import check_functions, without_own
from autopar.onnx.isolated import RefusedError, isolated
from autopar.onnx.names import with_plain_names
from autopar.onnx.text import check_texts

OLDEST_OPSET = 7
"""From here on binary ops broadcast as numpy does; older models go through onnx's own converter first."""

_CONVERTED_OPSET = 13
_NEWEST_VERSION = 2**31 - 1  # of a domain; the library counts them in 32 bits
_MAGIC = {
    b"PK\x03\x04": "a zip archive (a PyTorch checkpoint?)",
    b"\x89HDF": "an HDF5 file (a Keras model?)",
    b"\x80\x02": "a pickle (a PyTorch checkpoint?)",
}
_MAX_BYTES = 2**31 - 1  # of a protobuf message
_FIELD_IR_VERSION = 0x08  # the first byte of every ModelProto: its field 1, a varint


@dataclass(frozen=True, slots=True)
class Source:
    """A model as read.

    Attributes:
        model: Without local functions; weights may lack their data.
        sha256: Of the file, or of the model in memory.
        folder: Where external data lies; None if unknown.
        opset: Version of the default domain.
        domains: Versions of all imported domains.
    """

    model: onnx.ModelProto
    sha256: str
    folder: Path | None
    opset: int
    domains: dict[str, int]


@border
def read(source: str | Path | onnx.ModelProto) -> Source:
    """Read a model.

    Raises:
        ModelError: If it is not there, not ONNX, truncated, or of an opset that the installed `onnx` does not know.
    """
    if isinstance(source, onnx.ModelProto):
        model, folder, what = source, None, f"model {source.graph.name!r}"
        digest = hashlib.sha256(source.SerializeToString(deterministic=True)).hexdigest()
    else:
        path = Path(source)
        folder, what = path.parent, str(path)
        data = _bytes(path)
        model, digest = _parse(data, path), hashlib.sha256(data).hexdigest()
    check_texts(model)
    model = with_plain_names(model)
    if not model.graph.node or not model.opset_import:
        missing = "nodes" if not model.graph.node else "opset"
        raise ModelError(f"{what} has no {missing}: it is empty, truncated or not ONNX", hint="export the model again")
    domains = _domains(model)
    newest = onnx.defs.onnx_opset_version()
    opset = domains.get("", 0)
    if opset > newest:
        raise ModelError(
            f"{what} has opset {opset}; the installed onnx knows opsets up to {newest}",
            hint=f"pip install -U onnx, or export with opset_version={newest}",
        )
    if 0 < opset < OLDEST_OPSET:
        model = _converted(model, what)
    model = without_own(model)
    if model.functions:
        check_functions(model)
        model = _inlined(model, what)
    domains = _domains(model)
    return Source(model, digest, folder, domains.get("", newest), domains)


def _converted(model: onnx.ModelProto, what: str) -> onnx.ModelProto:
    try:
        with isolated() as process:
            return onnx.ModelProto.FromString(process.convert(model.SerializeToString(), _CONVERTED_OPSET))
    except RefusedError as error:
        raise ModelError(
            f"{what} cannot be brought from its opset to {_CONVERTED_OPSET}: {error}",
            hint=f"export it again with opset_version={_CONVERTED_OPSET} or newer",
        ) from error


def _inlined(model: onnx.ModelProto, what: str) -> onnx.ModelProto:
    try:
        with isolated() as process:
            return onnx.ModelProto.FromString(process.inline(model.SerializeToString()))
    except RefusedError as error:
        raise ModelError(
            f"the local functions of {what} cannot be inlined: {error}", hint="check the model with onnx.checker"
        ) from error


def _domains(model: onnx.ModelProto) -> dict[str, int]:
    """Return the versions of the domains a model imports.

    Raises:
        ModelError: If one is no version.
    """
    for item in model.opset_import:
        if not (0 if item.domain else 1) <= item.version <= _NEWEST_VERSION:
            raise ModelError(f"the model imports version {item.version} of domain {item.domain!r}")
    return {"" if item.domain == "ai.onnx" else item.domain: item.version for item in model.opset_import}


def _bytes(path: Path) -> bytes:
    if path.is_dir():
        raise ModelError(f"{path} is a directory", hint="give the .onnx file inside it")
    if path.is_char_device() or path.is_block_device():
        raise ModelError(f"{path} is a device, not a file")
    try:
        with path.open("rb") as file:
            _check_beginning(file.peek(), path)
            size = os.fstat(file.fileno()).st_size
            if size > _MAX_BYTES:
                raise ModelError(
                    f"{path} has {size} bytes; an ONNX file has {_MAX_BYTES} at most",
                    hint="save the model with its weights as external data",
                )
            return file.read()
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist", hint="give an .onnx file, or a zoo name such as zoo:gpt2") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _check_beginning(data: bytes, path: Path) -> None:
    """Check the first bytes of a file."""
    for magic, what in _MAGIC.items():
        if data.startswith(magic):
            raise ModelError(
                f"{path} is {what}, not an ONNX model", hint="export it with torch.onnx.export(..., dynamo=True)"
            )
    if not data or data[0] != _FIELD_IR_VERSION:
        what = "is empty" if not data else "is not an ONNX model"
        raise ModelError(f"{path} {what}", hint="export it with torch.onnx.export(..., dynamo=True)")


def _parse(data: bytes, path: Path) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise ModelError(
            f"{path} starts like an ONNX model but cannot be decoded: it is truncated or damaged ({len(data)} bytes)",
            hint="copy or export it again",
        ) from error
    return model
