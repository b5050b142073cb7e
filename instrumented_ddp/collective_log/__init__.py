"""Every collective of the process, written down before it is launched."""
