"""Studies: each one command with a table and a figure, through the library's public functions only."""
