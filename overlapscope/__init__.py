"""OverlapScope: see, decide and rescue data-parallel training.

Trace format, analysis and command line. Never imports torch.
"""

__version__ = "0.1.0"
