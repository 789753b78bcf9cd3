"""
Print usage errors as one line, `kmq: what is wrong; what to do`, with exit code 2, like all other errors of kmq.

Rule 1: only the form of the error changes; the parser finds the error.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, cast

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

# The parser is click or typer's own copy of it. Typer's public names work for both.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

EXIT_INTERRUPTED = 130

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
"""Settings of the parser's context; commands inherit them."""


class _ParserError(Protocol):
    """The used part of the parser's usage error."""

    exit_code: int
    ctx: typer.Context | None

    def format_message(self) -> str:
        """Return the error text."""

    def show(self) -> None:
        """Print the error in the parser's own form."""


def _run(main: Any, args: Sequence[str] | None, extra: dict[str, Any], *, standalone_mode: bool) -> Any:  # noqa: ANN401  # the parser's own `main`
    if not standalone_mode:
        return main(args=args, standalone_mode=False, **extra)
    try:
        result = main(args=args, standalone_mode=False, **extra)
    except _UsageError as error:
        _print(cast("_ParserError", error))
        sys.exit(cast("_ParserError", error).exit_code)
    except typer.Abort:
        sys.exit(EXIT_INTERRUPTED)
    # Without standalone mode, `main` returns an exit code or the command's result; commands of kmq return None.
    sys.exit(result if isinstance(result, int) else 0)


def _print(error: _ParserError) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    text = error.format_message().rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "kmq"
    typer.echo(f"kmq: {text[:1].lower()}{text[1:]}; see `{command} --help`", err=True)


class OneLineGroup(TyperGroup):
    """A command with subcommands that prints usage errors as one line."""

    def main(self, args: Sequence[str] | None = None, *_: Any, standalone_mode: bool = True, **extra: Any) -> Any:  # noqa: ANN401  # as above
        """Run it."""
        return _run(super().main, args, extra, standalone_mode=standalone_mode)


class OneLineCommand(TyperCommand):
    """A single command that prints usage errors as one line."""

    def main(self, args: Sequence[str] | None = None, *_: Any, standalone_mode: bool = True, **extra: Any) -> Any:  # noqa: ANN401  # as above
        """Run it."""
        return _run(super().main, args, extra, standalone_mode=standalone_mode)
