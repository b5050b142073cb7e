"""Several hosts simulated on one machine, connected by links with a rate and a latency. Needs Linux, and root."""
