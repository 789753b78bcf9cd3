"""
Prepare the next item of a generator in another thread while the caller processes the current one.

Rule 1: At most one item is prepared ahead, so that memory use is bounded.
Rule 2: An exception in the other thread is raised where the caller takes the item.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

Piece = TypeVar("Piece")


def one_ahead(pieces: Generator[Piece]) -> Generator[Piece]:
    """Yield the items of a generator, and produce the next one while the caller processes the current one."""
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="kmq-read-ahead") as other_thread:
            piece = next(pieces, None)
            while piece is not None:
                following = other_thread.submit(next, pieces, None)
                yield piece
                piece = following.result()
    finally:
        pieces.close()
