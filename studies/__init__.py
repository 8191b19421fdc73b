"""Tables and figures of the papers, and the project's own figures with their goals; not product."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
