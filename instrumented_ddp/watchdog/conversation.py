"""Communication of this rank with the others: over the job's store or, if that fails, a shared folder."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from instrumented_ddp.watchdog.channel import Board, Channel, FolderBoard, Round, connect, sees_all_ranks
from overlapscope.trace.format import WATCHDOG_FOLDER

_CONNECTS_WITHIN_S: Final = 1.0
_SILENT_ROUNDS: Final = 2
_FAREWELL_WITHIN_S: Final = 0.3


class PeerChannel:
    """Rounds over a board, for as long as there is a default process group.

    Args:
        run_folder: folder of the recording.
        rank: rank of this process.
        world_size: returns the number of ranks of the job, even after its process group is gone.
        farewell: returns the messages to write when this rank leaves a board.
    """

    def __init__(
        self, run_folder: Path, rank: int, world_size: Callable[[], int], farewell: Callable[[], dict[str, str]]
    ) -> None:
        self._run_folder = run_folder
        self._rank = rank
        self._world_size = world_size
        self._farewell = farewell
        self._channel: Channel | None = None
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._unanswered = 0
        self._uses_folder = False

    def is_possible(self) -> bool:
        """Return whether there are other ranks. A board of a previous or destroyed process group is left."""
        try:
            group = _get_default_group()
        except ValueError:  # there is none, or not any more
            self.leave()
            return False
        if group.size() == 1:
            self.leave()
            return False
        if self._group() is not group:  # of another store
            self.leave()
            self._group = weakref.ref(group)
        return True

    def exchange(self, round_: Round) -> Round | None:
        """Write and read the messages of a round.

        Returns:
            The round, with its replies or an error; None if the board does not answer in time.
        """
        if self._channel is None:
            self._channel = Channel(self._connect)
        done = self._channel.exchange(round_, _CONNECTS_WITHIN_S)
        self._unanswered = 0 if done is not None and done.error is None else self._unanswered + 1
        return done

    @property
    def is_silent(self) -> bool:
        """Return whether the board has not answered for some rounds."""
        return self._unanswered >= _SILENT_ROUNDS

    def switch_to_folder(self) -> bool:
        """Switch to a board in the run's folder.

        Returns:
            True if that is possible, because all ranks have their folders in it.
        """
        if not self._uses_folder:
            if not sees_all_ranks(self._run_folder, self._world_size()):
                return False
            self._uses_folder = True
            self._channel = None
        return True

    def leave(self) -> None:
        """Write the final messages and leave the board. Does not wait if the board does not answer at once."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        channel.exchange(Round(writes=self._farewell(), keys_to_poll=()), _FAREWELL_WITHIN_S)
        channel.close()

    def _connect(self) -> Board:
        if self._uses_folder:
            return FolderBoard(self._run_folder / WATCHDOG_FOLDER, self._rank, self._world_size())
        return connect(self._run_folder, self._rank, self._world_size())
