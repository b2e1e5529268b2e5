"""Command lines: configuration in, results out."""
