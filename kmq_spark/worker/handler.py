"""Find the handler that a command line names."""

from __future__ import annotations

import difflib
import inspect
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kmq_spark.consumer.message import text_of_failure
from kmq_spark.consumer.worker import check_handler
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


def load_handler(path: str) -> Callable[[Any], Any]:
    """Import `module:handler` and check that it can be called with a message; ConfigError says what is wrong."""
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ConfigError(f"handler has a wrong form: got {path!r}; expected module:handler, as in shop.orders:handle")
    found: Any = _import(module_name, path)
    for part in name.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"did you mean {close[0]!r}?" if close else "correct the name"
            raise ConfigError(f"handler does not exist: got {path!r}; {module_name!r} has no {part!r}; {hint}")
        found = getattr(found, part)
    if isinstance(found, type):  # calling it would make an object of each message, and acknowledge it
        raise ConfigError(f"handler is a class: got {path!r}; expected a function; name an instance with __call__")
    check_handler(found)
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:  # every message would fail, until all are dead letters
        raise ConfigError(f"handler does not take one message: got {path!r}: {error}; expected one argument") from error
    except ValueError:  # some built-in functions have no signature
        pass
    return found  # type: ignore[no-any-return]  # `check_handler` looked


def _import(module_name: str, path: str) -> object:
    try:
        return import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            why, repair = f"there is no module {error.name!r}", "run the command in its folder, or install it"
        else:
            place = traceback.extract_tb(error.__traceback__)[-1]
            why, repair = f"{text_of_failure(error)} ({place.filename}:{place.lineno})", "correct the module"
        raise ConfigError(f"cannot import the module of the handler: got {path!r}: {why}; {repair}") from error
