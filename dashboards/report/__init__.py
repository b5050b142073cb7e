"""The report: the content of the pages of a recording, in one file that needs neither a server nor a network."""
