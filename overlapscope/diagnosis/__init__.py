"""From what ranks have left, or tell each other, to a verdict: what is wrong, on which rank, where and since when.

The same rules judge a job while it runs (the watchdog of ``instrumented_ddp``) and afterwards (``overlapscope
diagnose``): ``evidence`` is what both hand in, ``verdict`` what comes out. Needs numpy and nothing else, because it
also runs inside the training process.
"""
