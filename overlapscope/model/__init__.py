"""Prediction of the step time with other bucket plans: the cost of communication, a replay, and a search for the best.

Pure numpy, because ``bucket_cap_mb="auto"`` uses it inside the training process. ``observation`` is the input of
``cost`` and ``work``, which ``fit`` combines; ``schedule`` replays bucket plans with the result; ``plan`` lists the
plans worth predicting and ``search`` finds the best one.
"""
