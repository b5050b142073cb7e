"""A recording in the formats of other tools: trace viewers, monitoring, tables."""
