"""Data with sources, and what finds a line of it: README.md in this folder says what is where."""
