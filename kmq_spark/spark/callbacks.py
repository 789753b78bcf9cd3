"""
A function that Spark's JVM calls back, and that is forgotten when its query has ended.

Rule 1: py4j keeps a function that was handed to the JVM until Java's collector frees the other side, which may be hours
later or never. So the function must not keep what its query used: clients with their connections and threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kmq_spark.errors import KmqError

if TYPE_CHECKING:
    from collections.abc import Callable


class Callback:
    """
    A function until `forget`.

    Args:
        function: Called with the arguments of each call.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        """Keep the function."""
        self._function: Callable[..., None] | None = function

    def __call__(self, *arguments: Any) -> None:
        """
        Call the function.

        Raises:
            KmqError: It was forgotten: the query has ended.
        """
        function = self._function
        if function is None:
            message = "Spark began a batch of a query that has ended: nothing is sent; the next query runs it again"
            raise KmqError(message)
        function(*arguments)

    def forget(self) -> None:
        """Let the function go, with all that it uses. A call that runs now goes on to its end."""
        self._function = None
