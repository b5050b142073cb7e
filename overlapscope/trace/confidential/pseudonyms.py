"""Pseudonyms: the same for equal names, in all files and on all ranks; without the key nobody can test a guess."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final

from overlapscope.errors import make_printable

_DIGEST_BYTES: Final = 4
"""Two of ten thousand names have one pseudonym in one recording of a hundred."""
_PSEUDONYM: Final = re.compile(r"\b(?:(file_[0-9a-f]{8})(?:\.\w+)?|([a-z]+_[0-9a-f]{8}|[A-Z]+_[0-9A-F]{8}))\b")
"""The pseudonym of a file stands for its whole path, but keeps its ending."""


class Pseudonyms:
    """Pseudonyms of one recording, or of several that have one key.

    Args:
        key: secret of 64 bytes at most.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.names: dict[str, str] = {}
        """What each pseudonym stands for."""
        self.unknown: set[str] = set()
        """Fields that were dropped because the allow list does not know them: ``FILE: KEY``."""

    def hide(self, kind: str, text: str) -> str:
        """Return the pseudonym of a text, such as ``host_3f9a1c02``; an empty text stays empty.

        Args:
            kind: what the text is, in lower case. Equal texts of two kinds have different pseudonyms.
        """
        if not text:
            return ""
        pseudonym = f"{kind}_{self.digest(kind, text, _DIGEST_BYTES).hex()}"
        self.names[pseudonym] = text
        return pseudonym

    def reveal(self, text: str) -> str:
        """Return a text with names in place of those pseudonyms that have been given out."""
        return _PSEUDONYM.sub(lambda found: make_printable(self.names.get(found[1] or found[2], found[0])), text)

    def digest(self, kind: str, text: str, size: int) -> bytes:
        """Return a keyed hash of a text, which can't be guessed from it."""
        data = f"{kind}\0{text}".encode(errors="surrogatepass")  # JSON may hold halves of characters
        return blake2b(data, key=self._key, digest_size=size).digest()
