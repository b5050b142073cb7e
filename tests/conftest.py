"""What all tests share: properties are about results, and a loaded machine is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")
