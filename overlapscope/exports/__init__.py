"""Exporters of a recording to the formats of other tools: trace viewers, monitoring, tables."""
