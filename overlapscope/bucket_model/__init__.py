"""The step time with any other bucket plan: the cost of communication, a replay of recorded steps, and a search.

Pure numpy, because ``bucket_cap_mb="auto"`` uses it inside the training process.
"""
