"""Two recordings, two ranges of steps or two plans: the difference of their breakdowns, and how sure it is."""
