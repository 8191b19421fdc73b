"""The Self-Draft paper: one file for each of its figures, and speed on code."""
