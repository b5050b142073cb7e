"""Analysis: pure functions from tables to tables or frozen dataclasses. Computes, never draws."""
