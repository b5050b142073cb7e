"""The subcommands of the command line, one per module."""
