"""
Write what docs/commands.md and docs/configuration.md have below their mark, from the commands and the settings.

    make docs                                  # write
    .venv/bin/python docs/generate.py --check  # exit code 1 where a page is not up to date
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import annotated_types
import typer.main
from pydantic_core import PydanticUndefined

from kmq_spark.cli.main import app
from kmq_spark.config import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

MARK = "<!-- What follows is generated: make docs -->\n"


def commands() -> Iterator[str]:
    """Yield a section for each command, with its arguments and options."""
    for words, command in _leaves(typer.main.get_command(app), "kmq"):
        context = command.make_context(words, [], resilient_parsing=True)
        rows = [found for each in command.params if (found := each.get_help_record(context)) is not None]
        arguments = [each.metavar for each in command.params if each.param_type_name == "argument"]
        heading = " ".join([words, *arguments])
        yield f"\n## `{heading}`\n\n{inspect.cleandoc(command.help)}\n"
        if rows:
            yield "\n| | |\n|---|---|\n"
            yield from (f"| `{_cell(name)}` | {_cell(meaning)} |\n" for name, meaning in rows)


def settings() -> Iterator[str]:
    """Yield a section for each table of the settings file, with its keys."""
    for section, field in Settings.model_fields.items():
        model: Any = field.annotation
        if not hasattr(model, "model_fields"):
            continue
        yield f"\n## `[{section}]`\n\n{inspect.cleandoc(model.__doc__).split(': ', 1)[1]}\n"
        yield "\n| key | default | bounds | |\n|---|---|---|---|\n"
        for key, each in model.model_fields.items():
            yield f"| `{key}` | {_default(each)} | {_bounds(each)} | {_cell(each.description or '')} |\n"


def _leaves(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from _leaves(each, f"{words} {name}")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return ""
    return f"`{list(value)!r}`" if isinstance(value, tuple) else f"`{value!r}`"


def _bounds(field: FieldInfo) -> str:
    low = next((bound.ge for bound in field.metadata if isinstance(bound, annotated_types.Ge)), None)
    high = next((bound.le for bound in field.metadata if isinstance(bound, annotated_types.Le)), None)
    if low is not None:
        return f"{low} to {high}"
    choices = getattr(field.annotation, "__args__", ())
    return ", ".join(f"`{each}`" for each in choices if isinstance(each, str))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def main() -> int:
    """Write the pages, or check them; return the exit code."""
    is_wrong = False
    for name, parts in (("commands", commands()), ("configuration", settings())):
        page = Path(__file__).with_name(f"{name}.md")
        before = page.read_text(encoding="utf-8")
        wanted = before.partition(MARK)[0] + MARK + "".join(parts)
        if wanted == before:
            continue
        if "--check" in sys.argv:
            sys.stderr.write(f"docs/{name}.md is not up to date: run `make docs`\n")
            is_wrong = True
        else:
            page.write_text(wanted, encoding="utf-8")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
