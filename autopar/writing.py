"""Files that are written whole or not at all."""

import os
import tempfile
from pathlib import Path

from autopar.errors import PlanError


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new, never half of it.

    Raises:
        PlanError: If the folder cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise PlanError(f"cannot write {str(path)!r}: {error.strerror}", hint="choose another folder with -o") from None
