"""A case: files, and a command that reads them."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

Seeds = Mapping[str, bytes]
"""Files that are right, by name, of which cases are mutations."""


@dataclass(frozen=True, slots=True)
class Case:
    """What one run of the program is given.

    Attributes:
        arguments: What is typed after the program's name.
        files: Files of the folder it runs in, by name.
    """

    arguments: tuple[str, ...]
    files: Mapping[str, bytes]

    def write(self, folder: Path) -> None:
        """Write the files into a folder, with the command beside them."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        (folder / "command").write_bytes(self.command.encode(errors="surrogateescape") + b"\n")

    @property
    def command(self) -> str:
        """The command as it would be typed in that folder."""
        return f"python -m autopar {shlex.join(self.arguments)}"


Maker = Callable[[Random, Seeds], Case]
"""Makes a case of a kind."""


def random_of(kind: str, seed: int, number: int) -> Random:
    """Return what the case of a number is made from."""
    return Random(f"{kind} {seed} {number}")
