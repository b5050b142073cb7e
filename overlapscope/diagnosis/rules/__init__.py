"""Rules of the diagnosis, one module per family of faults: functions from facts to a verdict or None."""
