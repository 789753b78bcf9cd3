"""What `kmq worker` runs: a handler named on the command line, in threads or in processes of its own."""
