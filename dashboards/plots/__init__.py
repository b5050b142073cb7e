"""The plots that pages are made of."""
