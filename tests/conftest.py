"""What all tests share: properties are about results, and a loaded machine is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no deadline")
settings.load_profile("no deadline")
