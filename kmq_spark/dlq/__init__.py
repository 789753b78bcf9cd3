"""Dead letters: list, redrive, purge."""
