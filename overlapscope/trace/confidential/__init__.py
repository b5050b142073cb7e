"""What a confidential recording holds: an allow list, field by field, and pseudonyms for all other text."""
