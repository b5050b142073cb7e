"""Sharded optimizer, as in Megatron: each rank keeps a shard of its state, and updates its shard of the parameters."""
