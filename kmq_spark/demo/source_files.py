"""
The input of the demo: the `.py` files of the standard library, and the function that counts their definitions.

Rule 1: the workers and the direct count call the same function; they only differ in how they get the files.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from pathlib import Path

LARGEST_FILE_BYTES = 900_000
"""Larger files do not fit into a message of 1 MiB with key and headers; the standard library has none today."""

BROKEN_FILES = {
    "kmq-demo/unclosed.py": b"def unclosed(:\n",
    "kmq-demo/indented.py": b"x = 1\n    y = 2\n",
    "kmq-demo/null_byte.py": b"x = '\x00'\n",
}
"""Files that cannot be parsed, for installations without such files (if the library's tests are a separate package)."""


def standard_library() -> dict[str, bytes]:
    """
    Read the standard library of this interpreter.

    Returns:
        Content by path relative to the library's folder, sorted by path.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts)
    contents = {str(path.relative_to(root)): path.read_bytes() for path in files if path.is_file()}
    return {path: content for path, content in contents.items() if len(content) <= LARGEST_FILE_BYTES}


def count_definitions(content: bytes) -> int:
    """
    Count the functions and classes of a source file.

    Raises:
        SyntaxError: The file cannot be parsed.
        ValueError: The content is not source text (null bytes, an unknown encoding).
    """
    with warnings.catch_warnings():
        # The library's tests contain invalid escapes and similar code on purpose.
        warnings.simplefilter("ignore")
        tree = ast.parse(content)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return sum(isinstance(node, kinds) for node in ast.walk(tree))


def count_directly(files: dict[str, bytes]) -> tuple[dict[str, int], set[str]]:
    """Count every file in this process, without a queue; return the counts and the files that cannot be parsed."""
    counts: dict[str, int] = {}
    broken: set[str] = set()
    for path, content in files.items():
        try:
            counts[path] = count_definitions(content)
        except (SyntaxError, ValueError, RecursionError):
            broken.add(path)
    return counts, broken
