"""Find words in code, docs and cards that stand where the field has a plainer or more exact one.

    python -m studies.words                    the number of hits in each folder
    python -m studies.words studies docs       file, line, hit and remedy for each one there

Read are comments, docstrings, strings of more than one word, identifiers, Markdown, recipes and scripts. Code
and quotations (`backticks`, "quotation marks", lines that begin with >) do not count. Exits with 1 if there
is a hit.
"""

import argparse
import ast
import bisect
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from studies import ROOT

OWN = ("studies/words.py", "tests/test_words.py")  # which have to name the words
RECORDED = ("docs/results/raw/", "docs/results/report.html")  # raw data, and the page made from it


@dataclass(frozen=True)
class Word:
    """A word to avoid.

    Attributes:
        pattern: finds it; case does not matter.
        instead: what to write.
        fine: uses of it that are plain English: no hit within a match of this one counts.
    """

    pattern: str
    instead: str
    fine: str = r"(?!)"


_SPEAKERS = (
    r"(target|model|drafter|classifier|head|layer|cache|judge|predictor|row|probability|confidence|annotation"
    r"|policy|tree|column|curve|calibration|forward|server|vLLM|it|they|rows|caches|ones|states|books|shares)s?"
)
WORDS = (
    Word(
        r"\bbehind\b",
        "after, below",
        r"\b(leave|leaving|leaves|left|stay|stays|fall|falls|lag|lags|lagging) (\w+ )?behind\b"
        r"|\bbehind (a|an|the) (flag|proxy|firewall|server)\b|\b(reason|idea)s? behind\b",
    ),
    Word(r"\bfore(tell|tells|told)\b", "predict"),
    Word(
        r"\b(tell|tells|told|telling)\b",
        "report, show, warn, name; an error for what is told",
        r"\b(tell|tells|told|telling) ([\w'-]+ ){0,6}(apart|from)\b|\b(cannot|can't|could not|hard to)"
        r" tell\b|\bcan you tell\?|\bTell\W+(Ġ)?me\b|\btold to\b",
    ),
    Word(r"\bmend(s|ed|ing)?\b", "fix, repair"),
    Word(r"\banew\b", "again"),
    Word(
        rf"\b{_SPEAKERS} (itself |alone |really |already |has |have )?(say|says|said)\b",
        "predict, generate, give, report",
        r"\bit (say|says|said) (so|otherwise)\b|(?<!what )\b(it|they) (say|says|said) (that|which)\b",
    ),
    Word(
        r"\b(say|says|said|saying) (nothing|little|all|in full|in (their|one|a) )"
        r"|\b(is|are|be|been|was|were) said\b|\bto say\b|\bto be said\b",
        "report, show, mean, state",
    ),
    Word(r"\b(lie|lies|lain)\b", "is, are, is stored, is between", r"\blies about\b"),
    Word(
        r"\b(stand|stands|stood|standing)\b",
        "is, are, appears, comes",
        r"\b(stand|stands|standing|stood)[- ](in|ins|for|out|alone|still)\b",
    ),
    Word(r"\b(go|goes|going|went) by\b", "use, be based on, follow", r"\btime (goes|went) by\b"),
    Word(r"\bdear(er|est)?\b", "expensive"),
    Word(r"\bso many\b", "that many, this many, N", r"\bso many ([\w-]+ ){1,4}that\b"),
    Word(
        r"\bas it is(?= (and|or|but|here|there|when|unless)\b)|\bas it is(?=\s*($|[^\w\s]))",
        "unchanged, as is",
    ),
    Word(r"\bwhatever\b", "any, regardless of, everything that"),
    Word(r"\bby turns\b", "alternately, interleaved"),
    Word(r"\bfor want of\b", "for lack of, without"),
    Word(r"\bof no account\b", "not read, ignored"),
)
DOCSTRING = Word(r"\A\s*(What|Whether)\b", "a verb: Return, Expand, Validate")
QUOTED = re.compile(r"`[^`]*`|“[^”]*”|(?<![\w\"])\"[^\"]*\"(?![\w\"])")
STRING = re.compile(r"(?is)^([a-z]*)('''|\"\"\"|'|\")(.*)\2$")


@dataclass
class Passage:
    """Text of some lines that is read as one: a docstring, a paragraph, successive comments or strings.

    Attributes:
        lines: (line number, its text).
        docstring: it is the docstring of a module, class or function.
    """

    lines: list[tuple[int, str]]
    docstring: bool = False

    def hits(self) -> Iterator[tuple[int, str, str]]:
        """Yield line number, the words found, and what to write instead."""
        starts, text = [], ""
        for _, line in self.lines:
            starts.append(len(text))
            text += line.strip() + " "
        text = QUOTED.sub(lambda match: " " * len(match[0]), text)
        for word in (*WORDS, DOCSTRING) if self.docstring else WORDS:
            fine = [match.span() for match in re.finditer(word.fine, text, re.IGNORECASE)]
            case = 0 if word is DOCSTRING else re.IGNORECASE
            for match in re.finditer(word.pattern, text, case):
                if not any(a <= match.start() and match.end() <= b for a, b in fine):
                    line = self.lines[bisect.bisect(starts, match.start()) - 1][0]
                    yield line, match[0].strip(), word.instead


def python_passages(text: str) -> Iterator[Passage]:
    """Yield the comments, docstrings, strings of several words and identifiers of a Python file."""
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
    }
    names: set[str] = set()
    kind, current = None, Passage([])
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            continue
        if token.type != kind:
            yield from readable(kind, current)
            kind, current = token.type, Passage([])
        if token.type == tokenize.COMMENT:
            current.lines.append((token.start[0], token.string.lstrip("# ")))
        elif token.type == tokenize.STRING:
            current.docstring |= token.start[0] in docstrings
            inside = string_text(token.string).split("\n")
            current.lines += [(token.start[0] + i, line) for i, line in enumerate(inside)]
        elif token.type == tokenize.NAME and token.string not in names:
            names.add(token.string)
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", token.string).replace("_", " ").strip()
            if " " in words or words in ("told", "said"):
                yield Passage([(token.start[0], words)])
    yield from readable(kind, current)


def readable(kind: int | None, passage: Passage) -> Iterator[Passage]:
    """Yield a passage of comments, or of strings that are prose and no key or name."""
    text = " ".join(line for _, line in passage.lines)
    if kind == tokenize.COMMENT or (kind == tokenize.STRING and re.search(r"\w\s+\w", text)):
        yield passage


def string_text(literal: str) -> str:
    """Return the text of a string literal, as written; without the expressions of an f-string."""
    match = STRING.match(literal)
    inside = match[3].replace('\\"', '"')
    return re.sub(r"\{[^{}]*\}", " ", inside) if "f" in match[1].lower() else inside


def markdown_passages(text: str) -> Iterator[Passage]:
    """Yield the paragraphs, table rows and list items of a page, without code and quotations."""
    text = re.sub(r"```.*?```|<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    yield from paragraphs((i, "" if line.startswith(">") else line) for i, line in numbered(text))


def comment_passages(text: str, sign: str) -> Iterator[Passage]:
    """Yield the comments of a file whose comments begin with `sign`."""
    found = ((i, re.search(rf"(?:^|\s){sign}+(.*)", line)) for i, line in numbered(text))
    yield from paragraphs((i, match[1] if match else "") for i, match in found)


def paragraphs(lines: Iterator[tuple[int, str]]) -> Iterator[Passage]:
    """Yield lines joined up to the next empty one; a table's row and a list's item are on their own."""
    current = Passage([])
    for i, line in lines:
        if not line.strip() or re.match(r"\s*([-*|]|\d+\.)", line):
            yield current
            current = Passage([])
        if line.strip():
            current.lines.append((i, line))
    yield current


def numbered(text: str) -> Iterator[tuple[int, str]]:
    return enumerate(text.split("\n"), 1)


READERS = {
    ".py": python_passages,
    ".md": markdown_passages,
    ".html": markdown_passages,
    ".sh": lambda text: paragraphs(numbered(text)),
    ".yaml": lambda text: comment_passages(text, "#"),
    ".toml": lambda text: comment_passages(text, "#"),
    ".cpp": lambda text: comment_passages(text, "//"),
    ".mjs": lambda text: comment_passages(text, "//"),
}


def files(places: Sequence[str] = ()) -> list[str]:
    """List the tracked and new files that are read, from the root; below some places if there are any."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *places]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(
        path
        for path in found
        if Path(path).suffix in READERS
        and path not in OWN
        and not path.startswith(RECORDED)
        and (ROOT / path).exists()
    )


def hits(path: str) -> list[tuple[int, str, str]]:
    """List line, words and remedy for each hit in a file, in order."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return sorted(hit for passage in READERS[Path(path).suffix](text) for hit in passage.hits())


def main(argv: Sequence[str] | None = None) -> int:
    """Print hits, or their number in each folder; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("places", nargs="*", metavar="PATH", help="files and folders to list the hits of")
    args = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    for path in files(args.places):
        for line, word, instead in hits(path):
            counts[str(Path(path).parent)] += 1
            if args.places:
                print(f"{path}:{line}: {word} ({instead})")
    if not args.places:
        for folder, n in sorted(counts.items()):
            print(f"{n:5}  {folder}")
    print(f"{counts.total():5}  in all", file=sys.stderr)
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
