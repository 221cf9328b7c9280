"""The command line: `main` has the table of commands, one file per command, `base` what they share."""
