"""The web app: a Panel server over a recording. Draws, never computes."""
