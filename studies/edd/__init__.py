"""The EDD paper: one file for each table and figure; `bench.py` and `trees.py` have what they share."""
