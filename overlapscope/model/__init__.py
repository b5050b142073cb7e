"""How long a step would take with other buckets: the cost of communication, a replay, and a search for the best.

Pure numpy, because ``bucket_cap_mb="auto"`` asks it inside the training process. ``observation`` yields ``cost`` and
``work``, combined in ``fit``; ``schedule`` replays bucket plans with them; ``plan`` lists the
plans worth predicting and ``search`` finds the best.
"""
