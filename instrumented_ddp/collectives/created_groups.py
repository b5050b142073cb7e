"""Process groups as this rank makes them: with which ranks, in which order, and at which line.

Every rank has to call ``new_group`` with the same lists in the same order: torch names groups by counting the calls,
and ranks that give different lists under one name meet in a group that none of them has meant. Each call is written
before it begins, because it may never return. ``use_local_synchronization`` names groups by their ranks, so such calls
are not comparable, and not recorded.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from instrumented_ddp.collectives.call_sites import CallSiteTable
from overlapscope.diagnosis.evidence import CallSite, CreatedGroup
from overlapscope.trace.json_files import dump_json_line
from overlapscope.trace.schema import CREATED_GROUPS_FILE

_log = logging.getLogger(__name__)

MAKES_GROUP: Final = "_new_group_with_tag"
"""Function of torch in which all ways to make a group by a list of ranks end."""
_MOST_WRITTEN: Final = 4096
_MOST_KEPT: Final = 8


class CreatedGroups:
    """Recorder of the groups that this process makes.

    Args:
        folder: folder of this rank.
        call_sites: call sites of this process.
    """

    def __init__(self, folder: Path, call_sites: CallSiteTable) -> None:
        self._path = folder / CREATED_GROUPS_FILE
        self._call_sites = call_sites
        self._written = 0
        self._worlds = 0
        self._count_before = 0
        self._lock = threading.Lock()
        self._latest: deque[CreatedGroup] = deque(maxlen=_MOST_KEPT)
        self._original = _wrap(self.on_call)

    @property
    def latest(self) -> tuple[CreatedGroup, ...]:
        """Return the latest groups whose creation has begun, in order."""
        return tuple(self._latest)

    def on_call(self, ranks: object, *, is_local: bool) -> None:
        """Record a call that is about to begin.

        Args:
            ranks: its list of ranks; None for all.
            is_local: whether only the members of the group take part.
        """
        count = count_created_groups()
        if is_local or count is None:
            return
        everyone = list(range(dist.get_world_size()))
        members = everyone if ranks is None else sorted(int(rank) for rank in ranks)  # type: ignore[attr-defined]
        frame = self._call_sites.find_caller_frame()
        file, line, function = self._call_sites.location(self._call_sites.number_of(frame)) or (None, None, None)
        with self._lock:
            self._worlds += count <= self._count_before  # the default group was made anew, and counting begun anew
            self._count_before = count
            made = CreatedGroup(
                name=f"{count} ({self._worlds + 1})" if self._worlds else str(count),
                ranks=tuple(members),
                backend=str(dist.get_backend()),
                call_site=CallSite(file=file, line=line, function=function) if file and line and function else None,
            )
            self._latest.append(made)
            self._written += 1
            if self._written <= _MOST_WRITTEN:
                with suppress(OSError), self._path.open("a", encoding="utf-8") as lines:
                    lines.write(dump_json_line(asdict(made)))

    def close(self) -> None:
        """Stop recording. May be called twice."""
        if self._original is not None:
            setattr(distributed_c10d, MAKES_GROUP, self._original)
            self._original = None


def count_created_groups() -> int | None:
    """Return the number of process groups that this rank has begun to create; None if this torch does not expose it."""
    count = getattr(getattr(distributed_c10d, "_world", None), "group_count", None)
    return count if isinstance(count, int) else None


def _wrap(on_call: Callable[..., None]) -> Callable[..., Any] | None:
    """Make torch's function announce each call, and return what it was; None if this torch has no such function."""
    original: Callable[..., Any] | None = getattr(distributed_c10d, MAKES_GROUP, None)
    if original is None:
        return None

    @functools.wraps(original)
    def announced(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            on_call(ranks, is_local=bool(kwargs.get("use_local_synchronization", args[4:5] == (True,))))
        except Exception as error:  # the group is made all the same
            _log.debug("a process group that is made is not recorded: %r", error)
        return original(ranks, *args, **kwargs)

    setattr(distributed_c10d, MAKES_GROUP, announced)
    return original
