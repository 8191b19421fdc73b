"""The project's own figures: one module for each topic or part of one, `python -m studies.figures TOPIC`."""
