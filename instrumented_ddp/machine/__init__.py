"""Sampling of the machine while it trains: GPUs through NVML, control groups, pressure, interfaces, InfiniBand."""
