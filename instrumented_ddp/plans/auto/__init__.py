"""``bucket_cap_mb="auto"``: measure some steps, predict all sizes, try the best ones, and keep the fastest."""
