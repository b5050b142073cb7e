"""Rules of an allow list: each turns one value of a JSON file into what a confidential recording has in its place.

A rule never raises. What is not of the kind that it expects becomes null, which readers take for damage, as they took
the value itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import hexdigits
from typing import Any, Final

from overlapscope.trace.confidential.pseudonyms import Pseudonyms
from overlapscope.trace.confidential.public_words import WORDS

Rule = Callable[[Pseudonyms, Any], Any]

_TOKEN: Final = re.compile(r"[^\s,=:()\[\]]+")
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
_VERSION: Final = re.compile(
    r"(\d+(?:\.\d+)*(?:(?:a|b|rc|\.post|\.dev)\d+)?)(\+(?:cpu|cu\d+|rocm[\d.]+))?(.*)", re.DOTALL
)
_GROUP: Final = re.compile(r"(.*?)( \(\d+\))?", re.DOTALL)
_DESCRIPTIONS: Final = ("undefined", "default", "default_pg")
_PROCESS: Final = re.compile(r"((?:Spawn|Fork|ForkServer)?Process|Thread)-[\d:-]+|\d+")


def number(_: Pseudonyms, value: Any) -> Any:
    """Keep a number, a truth value or null."""
    return value if value is None or isinstance(value, (bool, int, float)) else None


def numbers(pseudonyms: Pseudonyms, value: Any) -> Any:
    """Keep numbers in lists of any depth."""
    if isinstance(value, list):
        return [numbers(pseudonyms, one) for one in value]
    return number(pseudonyms, value)


def text(hide: Callable[[Pseudonyms, str], str]) -> Rule:
    """Make a rule of a function that hides a text; null stays null."""
    return lambda pseudonyms, value: hide(pseudonyms, value) if isinstance(value, str) else None


def hidden(kind: str) -> Rule:
    """Replace a text by its pseudonym."""
    return text(lambda pseudonyms, value: pseudonyms.hide(kind, value))


def many(rule: Rule) -> Rule:
    """Apply a rule to each item of a list."""
    return lambda pseudonyms, value: [rule(pseudonyms, one) for one in value] if isinstance(value, list) else None


def each(*rules: Rule) -> Rule:
    """Apply one rule after the other to the items of a list that has as many."""
    return lambda pseudonyms, value: (
        [rule(pseudonyms, one) for rule, one in zip(rules, value, strict=False)] if isinstance(value, list) else None
    )


def by(key_rule: Rule, rule: Rule) -> Rule:
    """Apply one rule to the keys of an object, and another to its values."""
    return lambda pseudonyms, value: (
        {str(key_rule(pseudonyms, key)): rule(pseudonyms, one) for key, one in value.items()}
        if isinstance(value, dict)
        else None
    )


def record(rules: Mapping[str, Rule]) -> Rule:
    """Apply a rule to each key of an object. Keys without one are dropped and noted: they are private by default."""

    def hide(pseudonyms: Pseudonyms, value: Any) -> Any:
        if not isinstance(value, dict):
            return None
        pseudonyms.unknown |= value.keys() - rules.keys()
        return {key: rules[key](pseudonyms, one) for key, one in value.items() if key in rules}

    return hide


def _hide_word(pseudonyms: Pseudonyms, value: str) -> str:
    return value if value in WORDS or _NUMBER.fullmatch(value) else pseudonyms.hide("word", value)


word: Final = text(_hide_word)
"""Keep one of the words of OverlapScope, Python and torch, or a number that is a key."""


def _hide_tokens(pseudonyms: Pseudonyms, value: str) -> str:
    return _TOKEN.sub(lambda found: _hide_token(pseudonyms, found[0]), value)


def _hide_token(pseudonyms: Pseudonyms, token: str) -> str:
    if _NUMBER.fullmatch(token) or token in WORDS:
        return token
    return ".".join(part if part in WORDS else pseudonyms.hide("word", part) for part in token.split("."))


tokens: Final = text(_hide_tokens)
"""Keep numbers, known words, and what is between them: ``cpu:gloo``, ``reduce_dtype=torch.bfloat16``."""


def setting(pseudonyms: Pseudonyms, value: Any) -> Any:
    """Keep a setting: numbers, and known words in texts and lists."""
    if isinstance(value, list):
        return [setting(pseudonyms, one) for one in value]
    return tokens(pseudonyms, value) if isinstance(value, str) else number(pseudonyms, value)


def _hide_variable(pseudonyms: Pseudonyms, name: str) -> str:
    pseudonym = pseudonyms.hide("variable", name).upper()
    pseudonyms.names[pseudonym] = name
    return pseudonym


variable: Final = text(_hide_variable)
"""Replace the name of an environment variable; the pseudonym is in capitals, by which readers know one."""


def _hide_version(pseudonyms: Pseudonyms, value: str) -> str:
    found = _VERSION.fullmatch(value)
    if found is None:
        return pseudonyms.hide("version", value)
    rest = pseudonyms.hide("version", found[3])
    return found[1] + (found[2] or "") + (f"+{rest}" if rest else "")


version: Final = text(_hide_version)
"""Keep the public part of a version."""


def _hide_group(pseudonyms: Pseudonyms, name: str) -> str:
    found = _GROUP.fullmatch(name)
    base, again = (name, "") if found is None else (found[1], found[2] or "")
    return (base if base.isdecimal() or base in _DESCRIPTIONS else pseudonyms.hide("group", base)) + again


group: Final = text(_hide_group)
"""Keep the number of a process group, and torch's own names; the other names are the user's."""


def _hide_description(pseudonyms: Pseudonyms, value: str) -> str:
    base = value.removesuffix("_pg")
    return value if value in _DESCRIPTIONS else pseudonyms.hide("group", base) + value[len(base) :]


description: Final = text(_hide_description)
"""Keep torch's own descriptions of process groups."""


def _hide_process(pseudonyms: Pseudonyms, name: str) -> str:
    found = _PROCESS.match(name)
    return found[0] if found else pseudonyms.hide("thread", name)


process: Final = text(_hide_process)
"""Keep the names that Python gives to threads and processes."""


def _hide_endpoint(pseudonyms: Pseudonyms, value: str) -> str:
    address, _, port = value.rpartition(":")
    return f"{pseudonyms.hide('address', address)}:{port}" if port.isdecimal() else pseudonyms.hide("address", value)


endpoint: Final = text(_hide_endpoint)
"""Replace the address of ``ip:port``."""


def _hide_source(pseudonyms: Pseudonyms, value: str) -> str:
    kind, space, identity = value.partition(" ")
    return _hide_word(pseudonyms, kind) + space + pseudonyms.hide("source", identity)


source: Final = text(_hide_source)
"""Keep the kind of a source of facts, and replace its identity."""


def digest(kind: str) -> Rule:
    """Replace a hash by another one, by which nobody can recognize what was hashed; an empty text stays empty."""
    return text(lambda pseudonyms, value: pseudonyms.digest(kind, value, 16).hex() if value else "")


def hide_plan_number(pseudonyms: Pseudonyms, number: int) -> int:
    """Return what a record has in place of the first 32 bits of a plan's hash."""
    return int.from_bytes(pseudonyms.digest("plan", f"{number:08x}", 4), "big") if number else 0


def _hide_plan(pseudonyms: Pseudonyms, value: str) -> str:
    begin = value[:8]
    if len(begin) < 8 or not {*begin} <= {*hexdigits.lower()}:
        return pseudonyms.digest("plan", value, 16).hex() if value else ""
    return f"{hide_plan_number(pseudonyms, int(begin, 16)):08x}{pseudonyms.digest('plan', value, 28).hex()}"


plan_hash: Final = text(_hide_plan)
"""Replace the hash of a bucket plan, whose first 32 bits records have too."""
