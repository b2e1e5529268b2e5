"""Command lines: flags, the console, how a program is started."""
