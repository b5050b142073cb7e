"""What can be wrong with a job: a module per family of faults; rules are functions from facts to a verdict or None."""
