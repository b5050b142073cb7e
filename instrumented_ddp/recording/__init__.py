"""Recording of a training process: steps, buckets, times, clocks, TCP connections, GC pauses, and how it ended."""
