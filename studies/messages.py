"""List the messages of the package's UserErrors that are not in the form `<what>: <constraint>, got <value>`.

    python -m studies.messages                       the number in each folder
    python -m studies.messages drafttrain/training   file, line and message of each one there

What is right, with {} for an expression:

    training.lr: must be above 0, got {}             a value; a remedy may follow after a semicolon or comma
    {}: no such file; train the drafter first        a file or folder: what is wrong; remedy
    {}: no such file                                 where the remedy is plain
    {}: {}                                           a message from further inside, with its place
    {}; see {} --help                                of the command line

Exits with 1 if any message is not in one of these forms.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from studies import ROOT

FORMS = (
    r".*\S: .*\b(must|expected) .+, got \S.*",
    r"[^;]*\S: [^;]+; \S.*",
    r".*\S: no such ([a-z-]+ )?(file|folder)( or folder)?",
    r"[^;:]*: \{\}|\{\}",
    r".*; see \{\} --help|.*; see drafttrain \{\} --help",
)
OLD = (
    r"\bis \{\}: ",  # training.lr is -1: it must be …
    r": \{\} is (too|not|none|no)\b",  # corpus.max_length: 1 is too small
    r"\bit must\b",
    r"^[^:]*\bis missing\b",
)
# Names of objects whose text is no business of a user's; their attributes, such as `target.name`, may be.
INTERNAL = {"self", "config", "target", "drafter", "tokenizer", "loaded", "args", "logits"}
# Errors whose text is one line: Python's own, and ours. Others go through `brief` or are joined.
ONE_LINE = {
    "UserError", "OSError", "FileNotFoundError", "KeyError", "IndexError", "TypeError", "ValueError",
    "AttributeError", "UnicodeError", "UnicodeDecodeError", "JSONDecodeError", "json.JSONDecodeError",
    "struct.error", "OverflowError", "zipfile.BadZipFile", "EOFError", "RecursionError",
    "NotImplementedError", "csv.Error", "zlib.error", "SafetensorError", "_Failed",
}  # fmt: skip


@dataclass(frozen=True)
class Raised:
    """A UserError in the code.

    Attributes:
        place: file and line, from the root.
        text: its message with {} for each expression; None where it is made elsewhere.
        shown: the expressions.
        caught: types of the exception that is being handled where it is raised, by the name it has there.
    """

    place: str
    text: str | None
    shown: tuple[ast.expr, ...]
    caught: dict[str, tuple[str, ...]]

    def fault(self) -> str | None:
        """Return what no message may have: several lines, or the text of an internal object."""
        if self.text is None:
            return None
        if "\n" in self.text:
            return "a line break"
        if not self.text.strip() or self.text != self.text.strip():
            return "empty, or blanks around it"
        for expression in self.shown:
            if isinstance(expression, ast.Name) and expression.id in INTERNAL:
                return f"shows the object {expression.id}"
            if isinstance(expression, ast.Name) and (types := self.caught.get(expression.id)):
                if other := set(types) - ONE_LINE:
                    return f"{', '.join(sorted(other))} may have several lines; use `brief`"
        return None

    def in_form(self) -> bool:
        """Return True if the message has one of the forms."""
        if self.text is None:
            return True
        return any(re.fullmatch(form, self.text) for form in FORMS) and not any(
            re.search(form, self.text) for form in OLD
        )


def template(node: ast.expr) -> tuple[str, list[ast.expr]]:
    """Return a message with {} for what is computed, and the expressions in their order."""
    if isinstance(node, ast.Constant):
        return str(node.value), []
    if isinstance(node, ast.FormattedValue):
        return "{}", [node.value]
    if isinstance(node, ast.JoinedStr | ast.BinOp):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node.left, node.right]
        texts, shown = zip(*map(template, parts))
        return "".join(texts), [one for some in shown for one in some]
    return "{}", [node]


def raised(path: Path, root: Path = ROOT) -> Iterator[Raised]:
    """Yield the UserErrors that a file makes, in order."""

    def walk(node: ast.AST, caught: dict[str, tuple[str, ...]]) -> Iterator[Raised]:
        if isinstance(node, ast.ExceptHandler) and node.name:
            types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            caught = {**caught, node.name: tuple(ast.unparse(one) for one in types)}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "UserError" and node.args:
            text, shown = template(node.args[0])
            made_elsewhere = isinstance(node.args[0], ast.Name | ast.Call)
            place = f"{path.relative_to(root)}:{node.lineno}"
            yield Raised(place, None if made_elsewhere else text, tuple(shown), caught)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, caught)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), {})


def all_raised(places: Sequence[str] = ("drafttrain",)) -> Iterator[Raised]:
    """Yield the UserErrors of files and folders."""
    for place in places:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield from raised(file)


def main(argv: Sequence[str] | None = None) -> int:
    """Print messages that are in no form, or their number in each folder; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("places", nargs="*", metavar="PATH", help="files and folders to list messages of")
    args = parser.parse_args(argv)
    errors = list(all_raised(args.places or ("drafttrain",)))
    wrong = [one for one in errors if one.fault() or not one.in_form()]
    for one in wrong if args.places else ():
        print(f"{one.place}: {one.text}" + (f" ({fault})" if (fault := one.fault()) else ""))
    if not args.places:
        counts = Counter(str(Path(one.place).parent) for one in wrong)
        for folder, n in sorted(counts.items()):
            print(f"{n:5}  {folder}")
    print(f"{len(wrong):5}  of {len(errors)} in all", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
