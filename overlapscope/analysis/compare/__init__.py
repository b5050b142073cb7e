"""Two recordings, two ranges of steps or two plans: the difference of their accounts, and how sure it is."""
