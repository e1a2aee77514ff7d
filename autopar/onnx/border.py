"""Where what libraries raise on the content of a model becomes an error of ours.

What can be checked is checked where it is read; what remains is what Python and protobuf say of text and numbers
wherever they first meet them.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from autopar.errors import ModelError

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

_SHOWN = 40  # bytes of a text that is no UTF-8


def border(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Return a function that reads a model, and that raises `ModelError` where a library gives up on it."""

    @wraps(function)
    def guarded(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except UnicodeDecodeError as error:
            raise ModelError(
                f"the model has a name or text that is not UTF-8: {error.object[:_SHOWN]!r}",
                hint="the file is damaged: copy or export it again",
            ) from error
        except OverflowError as error:
            raise ModelError(f"the model has a number that is out of range: {error}") from error
        except RecursionError as error:
            raise ModelError("the model has graphs nested too deeply", hint="export it without control flow") from error

    return guarded
