"""Pages of the app, one per module."""
