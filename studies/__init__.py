"""One file for each table or figure of the papers and of the project: `python -m studies.NAME`."""
