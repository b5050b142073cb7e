"""What a step would take with other buckets: what communication costs, a replay of the step, and a search for the best.

Pure numpy, because ``bucket_cap_mb="auto"`` asks it inside the training process. From an ``observation`` come
``cost`` and ``work``, brought together in ``fit``; ``schedule`` replays bucket plans with them; ``plan`` lists the
plans worth asking about and ``search`` finds the best.
"""
