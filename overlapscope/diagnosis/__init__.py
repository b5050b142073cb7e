"""From what ranks left, or tell each other, to a verdict: what is wrong, on which rank, where and since when.

The same rules judge a job while it runs (the watchdog of ``instrumented_ddp``) and afterwards (``overlapscope
diagnose``): ``evidence`` is what both put in, ``verdict`` what comes out. It needs only numpy, because it also runs
inside the training process.
"""
