"""What the words on pages mean, from the glossary of the documents."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from dashboards.assets import read_asset

_ALIASES: Final = {
    "exposed": "exposed communication",
    "hidden": "overlap",
    "ratio": "overlap ratio",
    "later by": "lateness",
    "saves": "saving",
    "saves if fixed": "saving",
    "90 % interval": "interval",
    "best": "transfer",
    "step time": "step",
    "all-reduces at their best": "replay",
    "all ranks at the median": "replay",
}
"""Words on pages for which the glossary has another one."""


def explain_term(label: str) -> str:
    """Return what the glossary says of a word or a heading; empty if it says nothing."""
    word = " ".join(label.lower().split())
    return _read_terms().get(_ALIASES.get(word, word), "")


@lru_cache(maxsize=1)
def _read_terms() -> dict[str, str]:
    """Return the plain text of each term's entry."""
    terms: dict[str, str] = {}
    for entry in re.split(r"\n- ", read_asset("docs/glossary.md"))[1:]:
        text = " ".join(entry.partition("\n\n")[0].split())
        plain = re.sub(r"\*+|`|\[([^]]*)\]\([^)]*\)", lambda match: match[1] or "", text)
        for term in re.findall(r"\*\*([^*]+)\*\*", text):
            # A term that is explained within the entry of another begins where it is named.
            terms.setdefault(term.lower(), plain[max(0, plain.find(term)) :])
    return terms
