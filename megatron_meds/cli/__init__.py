"""The command line: a short file per command."""
