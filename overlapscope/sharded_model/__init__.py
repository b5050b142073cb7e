"""The step time of a model that ``fully_shard`` has sharded, with other settings: predicted from one recording."""
