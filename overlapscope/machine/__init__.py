"""What the machine said while a job trained: clocks held down, quotas used up, pressure, errors; whom it sets apart.

It also runs inside the training process, so it needs numpy and nothing else.
"""
