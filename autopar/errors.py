"""The errors a caller can cause, each with what, where and what to do about it.

Every class also subclasses the builtin a Python user expects. An error of our own making is an `assert`, never one of
these.
"""


class AutoparError(Exception):
    """Base of every error a caller of autopar can cause.

    Attributes:
        hint: What to do about it, in words that could be typed in; empty if there is nothing to add.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  hint: {self.hint}" if self.hint else message


class ModelError(AutoparError, ValueError):
    """The model cannot be read or is not what it claims to be."""


class UnsupportedOpError(AutoparError, NotImplementedError):
    """An op of the model has no rule for what was asked of it (execution, gradient)."""


class ExecutionError(AutoparError, RuntimeError):
    """The kernel of an op does not take the inputs it was given; the message names the op and their shapes."""


class GraphError(AutoparError, ValueError):
    """A graph breaks a law of the IR; the message prints the surrounding ops."""


class ShardingError(AutoparError, ValueError):
    """A placement does not fit its tensor or mesh."""


class ClusterError(AutoparError, ValueError):
    """A cluster description is wrong; the message names the field and the unit."""


class StackError(AutoparError, ValueError):
    """A software stack is unknown or its description wrong; the message names the field, the hint its bounds."""


class ProblemError(AutoparError, ValueError):
    """A strategy-selection problem is malformed."""


class SolverError(AutoparError, RuntimeError):
    """A solver is unknown, not installed, cannot take this problem, or died before it found anything."""


class JobError(AutoparError, ValueError):
    """A request makes no sense for this model or cluster (0 GPUs, a batch that cannot be divided, ...)."""


class TacticError(AutoparError, ValueError):
    """A tactic speaks of an axis or value that is not there, or cannot do what it says."""


class PinError(AutoparError, ValueError):
    """A pin speaks of something that is not there, or of a value that cannot occur; the hint has the nearest one."""


class PlanError(AutoparError, ValueError):
    """A plan file is malformed or does not belong to the model."""


class ProgramError(AutoparError, ValueError):
    """A lowered program breaks a law of programs, or its text is malformed; the message prints the surroundings."""


class RankError(AutoparError, RuntimeError):
    """A process of a run ended before its time, or cannot reach the others; the message says which one and why."""


class WorkerError(AutoparError, RuntimeError):
    """Processes of a search kept ending before their time, or could not be started; the message says at what."""


class DataError(AutoparError, ValueError):
    """Measurements (published rows, a profile database, a trace) are missing or malformed; the message says where."""


class InfeasibleError(AutoparError, RuntimeError):
    """No plan or choice fits; the message says what is missing where, the hint the cheapest way out.

    Attributes:
        report: Of a job, all that was found out, an `autopar.sizing.records.Infeasibility`; else None.
    """

    def __init__(self, message: str, *, hint: str = "", report: object = None) -> None:
        super().__init__(message, hint=hint)
        self.report = report


class InterruptedSearchError(AutoparError, RuntimeError):
    """The search was stopped before it had a first plan or choice."""


class ExportError(AutoparError, ValueError):
    """A plan cannot be said in a framework's words at all, or a framework's configuration cannot be read as a plan."""


def stopped() -> InterruptedSearchError:
    """Return what to raise when the preparation of a search is stopped: there is nothing to return yet."""
    return InterruptedSearchError(
        "stopped before the search began", hint="let it run longer, or give a larger --time-limit"
    )
