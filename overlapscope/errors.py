"""The exception type that users see as one sentence instead of a traceback."""


class OverlapScopeError(Exception):
    """A problem that the user can act on.

    The message is one line: what is wrong, where, and what to do. ``overlapscope.cli.main.main`` catches it, prints it,
    and exits non-zero.
    """
