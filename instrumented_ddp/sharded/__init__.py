"""Megatron's way: each rank keeps a shard of the optimizer's state, and updates its shard of the parameters."""
