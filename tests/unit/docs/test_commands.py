"""Every `kmq` command that a document, a settings file or an alert names exists, with each option that is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from kmq_spark.cli.main import app

ROOT = Path(__file__).parents[3]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES += sorted((ROOT / "conf").rglob("*.toml")) + sorted((ROOT / "conf").rglob("*.yml"))
FENCE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
IN_BLOCK = re.compile(r"^(?:.* )?(?:\.venv/bin/)?kmq ([a-z][^\n#]*)", re.MULTILINE)
IN_PROSE = re.compile(r"`kmq ([^`]+)`")

KMQ = typer.main.get_command(app)


def commands_of(text: str) -> list[list[str]]:
    """Return the words after `kmq` of each command; a pipe ends one, a comma does in prose (`dlq list, show`)."""
    in_blocks = [found for block in FENCE.findall(text) for found in IN_BLOCK.findall(re.sub(r"\\\n\s*", "", block))]
    found = [*in_blocks, *IN_PROSE.findall(FENCE.sub("", text))]
    return [each.split() for span in found for each in re.split(r" \| kmq ", span.split(", ")[0])]


def problem_of(words: list[str]) -> str:
    """Return what is wrong with a command, or nothing; words that are no options are values."""
    command = KMQ
    for word in words:
        commands = getattr(command, "commands", None)
        if commands is None or word.startswith("-"):
            break
        names = word.split("|")  # `run|once`: each exists, the first one's options stand for all
        missing = [name for name in names if name not in commands]
        if missing:
            return f"no command {missing[0]}"
        command = commands[names[0]]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    named = {word.strip("[]").partition("=")[0] for word in words if re.match(r"\[?--?[a-zA-Z]", word)}
    return ", ".join(sorted(f"no option {name}" for name in named - options - {"-h", "--help"}))


def test_a_command_that_is_not_there_is_found() -> None:
    assert problem_of(["queue", "make", "orders"]) == "no command make"
    assert problem_of(["queue", "create", "orders", "--parts", "4"]) == "no option --parts"
    assert problem_of(["dlq", "list|throw", "orders"]) == "no command throw"
    assert not problem_of(["tracker", "run|once", "QUEUE…"])
    assert commands_of("`kmq a b | kmq c --d`\n```sh\nseq 3 | kmq send orders   # x\n```") == [
        ["send", "orders"],
        ["a", "b"],
        ["c", "--d"],
    ]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_every_command_that_is_named_exists(path: Path) -> None:
    problems = {" ".join(words): problem_of(words) for words in commands_of(path.read_text("utf-8"))}
    assert not {command: problem for command, problem in problems.items() if problem}
