"""The C2T paper: one file for each table and figure, and what is ours beside them."""
