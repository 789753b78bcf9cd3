"""
Usage errors as one line: `kmq: what is wrong; what to do`, exit code 2, as every other error of ours.

Rule 1: only the form changes; what is wrong is found by the parser.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, cast

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

# The parser is click, or typer's own copy of it: both are reached by typer's public names alone.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

EXIT_INTERRUPTED = 130

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
"""Of the parser's context; commands inherit it."""


class _Told(Protocol):
    """What we use of a usage error."""

    exit_code: int
    ctx: typer.Context | None

    def format_message(self) -> str:
        """Return what is wrong."""

    def show(self) -> None:
        """Print it in the parser's own form."""


def _run(main: Any, args: Sequence[str] | None, extra: dict[str, Any], *, standalone_mode: bool) -> Any:  # noqa: ANN401  # the parser's own `main`
    if not standalone_mode:
        return main(args=args, standalone_mode=False, **extra)
    try:
        result = main(args=args, standalone_mode=False, **extra)
    except _UsageError as error:
        _tell(cast("_Told", error))
        sys.exit(cast("_Told", error).exit_code)
    except typer.Abort:
        sys.exit(EXIT_INTERRUPTED)
    # Without standalone mode an exit code is a result, and so is what a command returns: ours return nothing.
    sys.exit(result if isinstance(result, int) else 0)


def _tell(error: _Told) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    text = error.format_message().rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "kmq"
    typer.echo(f"kmq: {text[:1].lower()}{text[1:]}; see `{command} --help`", err=True)


class OneLineGroup(TyperGroup):
    """A command with subcommands."""

    def main(self, args: Sequence[str] | None = None, *_: Any, standalone_mode: bool = True, **extra: Any) -> Any:  # noqa: ANN401  # as above
        """Run it."""
        return _run(super().main, args, extra, standalone_mode=standalone_mode)


class OneLineCommand(TyperCommand):
    """A command by itself."""

    def main(self, args: Sequence[str] | None = None, *_: Any, standalone_mode: bool = True, **extra: Any) -> Any:  # noqa: ANN401  # as above
        """Run it."""
        return _run(super().main, args, extra, standalone_mode=standalone_mode)
