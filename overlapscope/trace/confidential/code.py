"""Source lines, stacks, tracebacks and messages without what they say of a job: structure and line numbers stay.

Which file is the user's, what a rank waits for and what kind of failure an exception is must be told from the copy as
from the original, so what ``user_code`` and diagnosis look for is kept: parts of paths that name libraries, types of
exceptions, and a few phrases in messages.
"""

from __future__ import annotations

import re
from typing import Final

from overlapscope.trace.confidential.pseudonyms import Pseudonyms
from overlapscope.trace.confidential.public_words import (
    ENDS_OF_PATHS,
    ERRORS,
    FUNCTIONS,
    PARTS_OF_NAMES,
    PARTS_OF_PATHS,
)
from overlapscope.trace.user_code import RAISES

_PYTHON: Final = re.compile(r"python3\.\d+")
_SINGLE_FILE_PACKAGE: Final = re.compile(r"/(?:site|dist)-packages/[^/]+$")
_TYPED_IN: Final = ("<string>", "<stdin>", "??")
_PHRASES: Final = re.compile(
    r"out of memory|can'?t allocate memory|cannot allocate memory|time[d]? ?out"
    r"|connection (?:was )?(?:closed|reset|refused|aborted)|broken pipe|socket (?:closed|timeout)"
    r"|remote (?:process|peer)|by peer|ncclRemoteError|ncclSystemError|recvBytes|sendBytes|watchdog|abort"
    r"|process group|shut|DDP expects same model across all ranks|Expected to have finished reduction"
    r"|connectFullMesh|remote=\[(?:127(?:\.\d+){3}|::1)\]|socket\w+Connect\b|client socket has|Duplicate GPU detected"
    r"|server socket has failed to listen",
    re.IGNORECASE,
)
_FRAME: Final = re.compile(r'(?P<indent> +)File "(?P<file>.+)", line (?P<line>\d+)(?P<comma>,?) in (?P<function>.+)')
_KEPT_LINES: Final = re.compile(
    r"Traceback \(most recent call last\):"
    r"|During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:"
    r"|  <no Python frame>|  Garbage-collecting|  \.\.\."
    r"|Timeout \(\d+:\d+:\d+(?:\.\d+)?\)!|"
)
_THREAD: Final = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+)")
_FATAL: Final = re.compile(
    r"Fatal Python error: (?:Aborted|Segmentation fault|Bus error|Illegal instruction|Floating point exception)?"
)
_EXCEPTION: Final = re.compile(r"(\w[\w.]*)(?:: (.*))?")
_MAX_PHRASES: Final = 8


def hide_name(pseudonyms: Pseudonyms, name: str) -> str:
    """Hide the name of a parameter, module or tensor: its parts one by one, so that modules hold what they held."""
    return ".".join(
        part if part in PARTS_OF_NAMES or part.isdecimal() else pseudonyms.hide("name", part)
        for part in name.split(".")
    )


def hide_function(pseudonyms: Pseudonyms, name: str) -> str:
    """Hide the qualified name of a function, part by part."""
    return ".".join(part if part in FUNCTIONS else pseudonyms.hide("function", part) for part in name.split("."))


def hide_error_type(pseudonyms: Pseudonyms, name: str) -> str:
    """Hide the type of an exception unless it is Python's or torch's."""
    return ".".join(part if part in ERRORS else pseudonyms.hide("error", part) for part in name.split("."))


def hide_file(pseudonyms: Pseudonyms, file: str) -> str:
    """Hide the path of a source file: ``/home/me/secret/train.py`` becomes ``file_3f9a1c02.py``.

    A path with parts that name libraries keeps these, and the places of the others after the first of them.
    """
    if file in _TYPED_IN or not file:
        return file
    if file.startswith("<"):
        return f"<ipython-{pseudonyms.hide('file', file)}>" if file.startswith("<ipython") else "<generated>"
    *folders, last = file.split("/")
    first = next((index for index, part in enumerate(folders) if _is_public(part)), len(folders))
    kept = [part if _is_public(part) else _hide_folder(pseudonyms, part) for part in folders[first:]]
    name = last if _is_public(last) else _hide_last(pseudonyms, last, file)
    left_out = [""] if folders[:first] and (kept or name == last) else []  # "": something was before it
    return "/".join([*left_out, *kept, name])


def _is_public(part: str) -> bool:
    return part in PARTS_OF_PATHS or _PYTHON.fullmatch(part) is not None


def _hide_folder(pseudonyms: Pseudonyms, part: str) -> str:
    return ("_" if part.startswith("_") else "") + pseudonyms.hide("folder", part)


def _hide_last(pseudonyms: Pseudonyms, last: str, file: str) -> str:
    stem, dot, end = last.rpartition(".")
    if _SINGLE_FILE_PACKAGE.search(file):  # of one name, wherever it is installed
        hidden = _hide_folder(pseudonyms, stem or last)
    else:
        hidden = ("_" if last.startswith("_") else "") + pseudonyms.hide("file", file)
    if not (dot and stem):
        return hidden
    return f"{hidden}.{end if end in ENDS_OF_PATHS else 0 if end.isdecimal() else 'other'}"


def hide_message(pseudonyms: Pseudonyms, message: str) -> str:
    """Hide a message, with the phrases in it that say what kind of failure it is: ``message_3f9a1c02 (timed out)``."""
    hidden = pseudonyms.hide("message", message)
    phrases = dict.fromkeys(found[0] for found in _PHRASES.finditer(message))
    return f"{hidden} ({', '.join([*phrases][:_MAX_PHRASES])})" if phrases else hidden


def hide_stacks(pseudonyms: Pseudonyms, text: str) -> str:
    """Hide what names a job in tracebacks, and in stacks of faulthandler: what is none of their lines is left out."""
    lines: list[str] = []
    is_source = False
    for line in text.splitlines():
        frame = _FRAME.fullmatch(line)
        hidden = (
            _hide_source(line) if is_source and line.startswith(" ") and not frame else _hide_line(pseudonyms, line)
        )
        is_source = frame is not None
        lines += [] if hidden is None else [hidden]
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


def _hide_source(line: str) -> str:
    return "    raise ..." if RAISES.search(line) else "    ..."


def _hide_line(pseudonyms: Pseudonyms, line: str) -> str | None:
    if _KEPT_LINES.fullmatch(line):
        return line
    if frame := _FRAME.fullmatch(line):
        file, function = hide_file(pseudonyms, frame["file"]), hide_function(pseudonyms, frame["function"])
        return f'{frame["indent"]}File "{file}", line {frame["line"]}{frame["comma"]} in {function}'
    if thread := _THREAD.match(line):
        return f"{thread[1]} {thread[2]} (most recent call first):"
    if fatal := _FATAL.match(line):
        return fatal[0]
    if exception := _EXCEPTION.fullmatch(line):
        kind, message = hide_error_type(pseudonyms, exception[1]), exception[2]
        return f"{kind}: {hide_message(pseudonyms, message)}" if message else kind
    phrases = [found[0] for found in _PHRASES.finditer(line)]
    return f" {', '.join(phrases[:_MAX_PHRASES])}" if phrases else None
