"""What to change: a recording turned into input for the bucket model, and its answers into advice."""
