"""Contract of ``_native.c``: that of the twins in Python."""

from instrumented_ddp.native.countdown import Countdown as Countdown
from overlapscope.trace.collective_log import EntryStore as EntryStore
from overlapscope.trace.event_log import RecordStore as RecordStore

INTERFACE: int
