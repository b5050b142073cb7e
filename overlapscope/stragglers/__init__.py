"""Which ranks, hosts and links the others wait for, since when, and what fixing it would save."""
