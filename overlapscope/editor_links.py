"""Links that open a line of code in an editor: chosen by ``OVERLAPSCOPE_EDITOR``, and only where they lead somewhere.

A recording is often read on another machine than it was made on, and its paths are whatever its writer says. So a line
is a link only if its file is on this machine, in the user's home or below the current folder: looking for a file
elsewhere could already mount a network drive. The scheme is of the user's choice, and every special character of a path
is encoded.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from overlapscope.errors import OverlapScopeError

EDITOR_VARIABLE: Final = "OVERLAPSCOPE_EDITOR"
LINE_OF_CODE: Final = re.compile(
    r"""(?<![^\s:;&<>()'"`])((?:\.\.\.)?(?:/[^\s/:;&<>()'"`]+)+/[^\s/:;&<>()'"`]+):([0-9]+)\b"""
)
"""Path of a file, or the end of one behind ``...``, and the number of a line.

What ends a path is also what has to be before one, so that a search takes no longer than the text is long.
"""

_FILE: Final = "file://{host}{path}"
"""The only address that every terminal knows. Browsers open none from a page."""
_EDITORS: Final = {
    "none": "",
    "file": _FILE,
    "vscode": "vscode://file{path}:{line}",
    "cursor": "cursor://file{path}:{line}",
    "pycharm": "pycharm://open?file={path}&line={line}",
}
_RUN_BY_BROWSERS: Final = ("javascript:", "data:", "vbscript:")


class CodeLink(NamedTuple):
    """A link in a text."""

    start: int
    end: int
    url: str


def read_editor(*, in_browser: bool) -> str:
    """Return the address of a line in the user's editor, with ``{path}`` and ``{line}``; empty for no links.

    Args:
        in_browser: True for pages and saved reports, which have links only if an editor is chosen.

    Raises:
        OverlapScopeError: the variable is neither the name of an editor nor such an address.
    """
    chosen = os.environ.get(EDITOR_VARIABLE) or ("none" if in_browser else "file")
    address = _EDITORS.get(chosen, chosen)
    is_address = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", address) and "{path}" in address
    if address and (not is_address or address.lower().startswith(_RUN_BY_BROWSERS)):
        names = ", ".join(_EDITORS)
        example = "vscode://vscode-remote/ssh-remote+HOST{path}:{line}"
        raise OverlapScopeError(f"{EDITOR_VARIABLE}={chosen}: no editor; give {names}, or an address like {example}")
    return "" if in_browser and address == _FILE else address


def link_line(path: str, line: str, address: str) -> str:
    """Return the URL that opens a line; empty if its file is not on this machine, or elsewhere than code of the user.

    Args:
        path: absolute path of a file, by a recording.
        line: number of the line.
        address: address of a line in the user's editor.
    """
    file = os.path.normpath(path)
    if not address or not any(file.startswith(f"{folder}/") for folder in _user_folders()) or not os.path.isfile(file):
        return ""
    values = {"{path}": quote(os.fsencode(file)), "{line}": line, "{host}": quote(socket.gethostname())}
    return re.sub(r"\{(?:path|line|host)\}", lambda match: values[match[0]], address)


def find_code_links(text: str, files: tuple[str, ...], address: str) -> Iterator[CodeLink]:
    """Find the lines of code in a text that can be opened.

    Args:
        text: text of a report.
        files: whole paths of files of which the text may show the end alone.
        address: address of a line in the user's editor.
    """
    for match in LINE_OF_CODE.finditer(text):
        path, line = match.groups()
        if path.startswith("..."):
            known = {file for file in files if file.endswith(path.removeprefix("..."))}
            path = known.pop() if len(known) == 1 else ""
        if url := link_line(path, line, address):
            yield CodeLink(match.start(), match.end(), url)


def _user_folders() -> list[str]:
    try:
        home = Path.home()
        folders = {str(home), os.path.realpath(home), os.getcwd()}
    except (OSError, RuntimeError):  # the current folder is gone, or the user has no home
        return []
    return [folder for folder in folders if folder != "/"]
