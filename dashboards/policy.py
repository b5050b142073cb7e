"""What browsers let pages and saved files do: load nothing from elsewhere, and be in frames of this machine only.

Names in recordings are escaped where they are drawn. This is for the day on which one of them is not: a script that got
into a page could still not send anything to another host.
"""

from __future__ import annotations

from typing import Final

# BokehJS makes functions of the text of callbacks, which is "unsafe-eval".
_CODE: Final = "'unsafe-inline' 'unsafe-eval'"
_PAGE: Final = f"default-src 'self' data: blob: {_CODE}; object-src 'none'; base-uri 'none'; form-action 'self'"
_FRAMES: Final = "frame-ancestors 'self' http://localhost:* http://127.0.0.1:* https://localhost:* vscode-webview:"

FILE_POLICY: Final = (
    f"default-src 'none'; script-src {_CODE}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'"
)
"""Policy of saved files, as ``<meta>``: they load nothing at all."""


def policy_headers(path: str) -> dict[str, str]:
    """Return the headers with the policies of what the server answers at a path."""
    # A plot alone is for embedding anywhere: nothing can be changed there.
    return {
        "Content-Security-Policy": _PAGE if "/plots/" in path else f"{_PAGE}; {_FRAMES}",
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
    }
