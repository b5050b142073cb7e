"""Texts of verdicts, one module per family of rules: templates of sentences, evidence and advice, and no judgment."""
