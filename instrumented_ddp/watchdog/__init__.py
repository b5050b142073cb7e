"""Compares a rank with its neighbours while it trains, and says what is wrong."""
