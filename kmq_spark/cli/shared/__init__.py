"""What several commands share: options, output, errors and exit codes, progress."""
