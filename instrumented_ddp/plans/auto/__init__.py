"""``bucket_cap_mb="auto"``: measure some steps, predict all bucket sizes, try the best ones, and keep the fastest."""
