"""Files a command will write, checked before the work whose result they are to hold."""

import tempfile
from pathlib import Path

from autopar.errors import JobError


def prepare_folder(folder: Path, hint: str = "choose another path with -o") -> Path:
    """Make a folder if needed and return it.

    Args:
        folder: The folder.
        hint: What to do if it cannot be used.

    Raises:
        JobError: If it is a file, or cannot be made or written to.
    """
    if folder.exists() and not folder.is_dir():
        raise JobError(f"cannot write into {str(folder)!r}: it is a file, not a folder", hint=hint)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise JobError(f"cannot write into {str(folder)!r}: {error.strerror}", hint=hint) from None
    return folder


def prepare_file(path: Path) -> Path:
    """Make the folder of a file if needed and return the file's path.

    Raises:
        JobError: If it is a folder, or its folder cannot be made or written to.
    """
    if path.is_dir():
        raise JobError(f"cannot write {str(path)!r}: it is a folder", hint="give the name of a file")
    prepare_folder(path.parent, "choose another path")
    return path
