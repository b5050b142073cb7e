"""The report: what the pages say of a recording, in one file that needs neither a server nor a network."""
