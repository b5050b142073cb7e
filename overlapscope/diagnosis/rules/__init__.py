"""What can be wrong with a job: a module a family of faults, a rule a function from facts to a verdict or None."""
