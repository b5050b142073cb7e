"""Many runs together: who stands out over weeks, how step time goes by model, and how runs end."""
