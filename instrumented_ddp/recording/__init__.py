"""What a training process writes down: records of steps and buckets, their times, clocks, links, pauses, its end."""
