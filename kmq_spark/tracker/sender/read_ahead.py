"""
Get the next piece ready in another thread while this one is at work on the one before.

Rule 1: one piece ahead and no more: what is in memory stays bounded.
Rule 2: what fails in the other thread is raised where its piece would have been taken.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

Piece = TypeVar("Piece")


def one_ahead(pieces: Generator[Piece]) -> Generator[Piece]:
    """
    Yield these pieces, each while the next one is made.

    Args:
        pieces: Run in one thread at a time; closed when this generator is, after the piece that it is at.
    """
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="kmq-read-ahead") as other_thread:
            piece = next(pieces, None)
            while piece is not None:
                following = other_thread.submit(next, pieces, None)
                yield piece
                piece = following.result()
    finally:
        pieces.close()
