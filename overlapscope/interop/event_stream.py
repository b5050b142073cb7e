"""Streaming reader of Chrome traces as torch.profiler writes them: events in batches, in bounded memory.

A trace is one JSON object that consists almost entirely of ``traceEvents``, or just their list. The text is cut between
two events every few megabytes; a piece that does not parse is read event by event, which takes longer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from overlapscope.errors import OverlapScopeError

Event = dict[str, Any]

_CHUNK_BYTES: Final = 4 * 1024**2
_MAX_HEADER_BYTES: Final = 64 * 1024**2
"""Maximum size of text before, between or after events; real traces have a few kilobytes."""
_EVENTS: Final = b'"traceEvents"'
_EVENT_KEY: Final = b'"ph"'
_GZIP: Final = b"\x1f\x8b"
_WITH_GZIP_HEADER: Final = 16 + zlib.MAX_WBITS
_COMPRESSED_CHUNK_BYTES: Final = 256 * 1024
_DECODER: Final = json.JSONDecoder()


class _Decompressor(Protocol):
    """The type of ``zlib.decompressobj()``, which has no public name."""

    @property
    def unconsumed_tail(self) -> bytes: ...

    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


class EventStream:
    """The events of one trace file; its other fields are known once all events have been read.

    Args:
        path: path of the trace, which may be compressed with gzip.

    Raises:
        OverlapScopeError: it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.header: dict[str, Any] = {}
        """Fields of the trace other than its events, such as ``distributedInfo``."""
        self.problem: str | None = None
        """Why events at the end of the file are missing; None if none are."""
        self.read_bytes = 0
        """Number of bytes read so far, compressed if the file is."""
        try:
            if not path.is_file():
                raise OverlapScopeError(f"{path}: not a file")
            self.size_bytes = path.stat().st_size
            self._raw = path.open("rb")
            is_compressed = self._raw.peek(2)[:2] == _GZIP
        except OSError as error:
            raise OverlapScopeError(f"{path}: can't be read ({error.strerror})") from None
        self._gzip: _Decompressor | None = zlib.decompressobj(wbits=_WITH_GZIP_HEADER) if is_compressed else None

    def batches(self) -> Iterator[list[Event]]:
        """Generate all events, some ten thousand at a time, in file order; integers beyond 64 bits become floats.

        Raises:
            OverlapScopeError: the file is not a trace.
        """
        with self._raw:
            before, text = self._find_events()
            while more := self._read_chunk():
                text += more
                events, text = self._split_complete_events(text)
                if events:
                    yield events
            events, after = self._parse_last_events(text)
            yield events
            self._read_header(before, after)

    def _read_chunk(self) -> bytes:
        try:
            chunk = self._raw.read(_CHUNK_BYTES) if self._gzip is None else self._decompress_chunk(self._gzip)
        except (OSError, zlib.error) as error:
            self.problem = f"it can't be read to its end ({error})"
            chunk = b""
        self.read_bytes = self._raw.tell()
        return chunk

    def _decompress_chunk(self, unpack: _Decompressor) -> bytes:
        while not (
            chunk := unpack.decompress(unpack.unconsumed_tail or self._raw.read(_COMPRESSED_CHUNK_BYTES), _CHUNK_BYTES)
        ):
            if unpack.eof:
                return b""
            if not unpack.unconsumed_tail and not self._raw.peek(1):
                self.problem = "its compression ends too early"
                return b""
        return chunk

    def _find_events(self) -> tuple[bytes, bytes]:
        """Return the text before the first event, and the text from there on that has been read."""
        text = self._read_chunk()
        if text.lstrip()[:1] == b"[":
            begin = text.index(b"[") + 1
            return b"", text[begin:]
        while (position := text.find(_EVENTS)) < 0 or (begin := text.find(b"[", position)) < 0:
            more = self._read_chunk()
            if not more or len(text) > _MAX_HEADER_BYTES:
                raise OverlapScopeError(
                    f"{self._path}: not a trace of torch.profiler (no list of traceEvents); export one with "
                    "prof.export_chrome_trace() or tensorboard_trace_handler()"
                )
            text += more
        return text[:position], text[begin + 1 :]

    def _split_complete_events(self, text: bytes) -> tuple[list[Event], bytes]:
        """Return complete events at the beginning of the text, and the text after them.

        The text is cut before the last event that has its ``"ph"``, as that one may be incomplete. Example:
        ``{"ph":1},{"ph":2},{"p`` is cut into the event ``{"ph":1}`` and the text ``{"ph":2},{"p``.
        """
        latest = text.rfind(_EVENT_KEY)
        comma = text.rfind(b",", 0, max(0, text.rfind(b"{", 0, max(0, latest))))
        if comma > 0:
            try:
                return orjson.loads(b"[" + text[:comma] + b"]"), text[comma + 1 :]
            except orjson.JSONDecodeError:
                pass  # the cut was within an event
        if len(text) <= _MAX_HEADER_BYTES:
            return [], text
        events, rest = self._parse_event_by_event(text)
        if not events:
            raise OverlapScopeError(f"{self._path}: not a trace ({len(text):,} bytes without a whole event)")
        return events, rest

    def _parse_last_events(self, text: bytes) -> tuple[list[Event], bytes]:
        """Return the last events, and the text after the list."""
        events, rest = self._parse_event_by_event(text)
        if not rest.lstrip().startswith(b"]") and self.problem is None:
            self.problem = "it ends in the middle of an event"
        return events, rest

    def _parse_event_by_event(self, text: bytes) -> tuple[list[Event], bytes]:
        """Return all complete events at the beginning of the text, and the rest of it."""
        decoded = text.decode("utf-8", errors="replace")
        events: list[Event] = []
        position = 0
        while True:
            begin = position
            while decoded[begin : begin + 1] in (",", " ", "\n", "\r", "\t") and begin < len(decoded):
                begin += 1
            if decoded[begin : begin + 1] != "{":
                return events, decoded[begin:].encode()
            try:
                event, position = _DECODER.raw_decode(decoded, begin)
            except (json.JSONDecodeError, RecursionError):
                return events, decoded[begin:].encode()
            events.append(event)

    def _read_header(self, before: bytes, after: bytes) -> None:
        """Parse the fields before and after the list of events; a truncated end is left out."""
        rest = after.lstrip()[1:].strip()
        for text in (
            before.strip() + b'"":0' + (rest if rest[:1] in (b",", b"}") else b"}"),
            before.strip() + b'"":0}',
        ):
            try:
                header = orjson.loads(text)
            except orjson.JSONDecodeError:
                continue
            if isinstance(header, dict):
                self.header = {name: value for name, value in header.items() if name}
                return
