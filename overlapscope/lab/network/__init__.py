"""Several hosts on one machine, joined by links that have a rate and a latency. Linux only, and root."""
