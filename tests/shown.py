"""What the documents show: their fenced blocks, commands in them, and the form of an output, without its numbers."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("sh", "bash")
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_ENDS_A_COMMAND = (">", ">>", "|", "&&")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a document."""

    page: str
    """Its path, from the root of the repository."""
    language: str
    """Empty for what a command prints, and for drawings."""
    text: str

    @property
    def first_line(self) -> str:
        return self.text.lstrip("\n").partition("\n")[0].strip()

    @property
    def commands(self) -> list[str]:
        """Lines of a shell block without comments, with those that follow a backslash or a pipe."""
        lines = re.sub(r"\\\n|(?<=\|)\n", " ", self.text).splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).strip())]

    def __str__(self) -> str:
        return f"{self.page}: {self.first_line}"


def blocks() -> list[Block]:
    """All blocks of all pages."""
    return [
        Block(page=str(page.relative_to(ROOT)), language=language, text=textwrap.dedent(text))
        for page in PAGES
        for _, language, text in _BLOCK.findall(page.read_text())
    ]


def own_commands(line: str) -> Iterator[list[str]]:
    """The arguments of each ``overlapscope`` of a line: after ``sudo``, ``ssh`` or a launcher, too."""
    words = shlex.split(line, comments=True)
    for place, word in enumerate(words):
        if word == "overlapscope" or word.endswith("bin/overlapscope"):
            yield list(takewhile(lambda each: each not in _ENDS_A_COMMAND, words[place + 1 :]))


def form(text: str) -> str:
    """An output without what differs between runs: numbers with their units, paths, who says it, white space."""
    text = re.sub(r"^\[rank \d+\] ", "", text, flags=re.MULTILINE)
    text = re.sub(r"\(\d[\d, -]*(?: \.\.\.)?\)", "(N)", text)  # steps
    text = re.sub(r"\S*/\S+|\b\w+\.py:\d+", "PATH", text)
    text = re.sub(r"[+−-]?\d[\d,.]*(?: (?:[mµn]?s|[kMG]?B)\b)?", "N", text)
    text = re.sub(r"─+", "─", text)
    return re.sub(r"\s+", " ", text)
