"""The collective log: every collective of the process, recorded before it is launched."""
