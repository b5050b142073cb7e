"""The web app: a Panel server that shows recordings. It draws, and leaves computation to ``overlapscope``."""
