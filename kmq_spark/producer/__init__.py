"""Producers that resume: messages and source position in one transaction. See docs/producing.md."""
