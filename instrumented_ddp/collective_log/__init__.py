"""Log of all collectives of the process, each written before it is launched."""
