"""What methods of a plan return as text: for interactive sessions, and in the words of a framework."""

from dataclasses import dataclass


class Text(str):
    """Text that an interactive session shows as it is, not as a quoted string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan in the words of a framework.

    Attributes:
        name: Name of the file, if the caller has none.
        data: Its content.
        lost: What of the plan the framework cannot be told, a sentence each.
        granted: What the prediction takes for granted and the file does not ask for, a sentence each.
        outcome: What the file comes to when it is read back and predicted; empty for placements.
    """

    name: str
    data: bytes
    lost: tuple[str, ...]
    granted: tuple[str, ...] = ()
    outcome: str = ""

    @property
    def text(self) -> str:
        """The content as text."""
        return self.data.decode()
