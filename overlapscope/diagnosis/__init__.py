"""Diagnosis of a distributed job: from recorded or live evidence to a verdict (fault, rank, location, time).

The same rules judge a job while it runs (the watchdog of ``instrumented_ddp``) and afterwards (``overlapscope
diagnose``): ``evidence`` defines the input of both, ``verdict`` the output. The package needs only numpy, because it
also runs inside the training process.
"""
