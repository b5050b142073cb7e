"""Tests that stock DistributedDataParallel passes and ours does not, each with the reason.

Only two are accepted: autograd over RPC, and the native mixed precision that torch keeps private. Never more than
``MOST_EXCEPTIONS``.
"""

from __future__ import annotations

MOST_EXCEPTIONS = 8

EXCEPTIONS: dict[str, str] = {}
