"""What is said of a recording, and its renderings as text, JSON and Markdown."""
