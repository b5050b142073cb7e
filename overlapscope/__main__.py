"""``python -m overlapscope``."""

from overlapscope.cli.main import entry_point

entry_point()
