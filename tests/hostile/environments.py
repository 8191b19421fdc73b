"""Odd surroundings of a command: terminals, pipes, caches, paths and variables."""

import os
import sys
from collections.abc import Callable

from tests.hostile.mutations import Mutation
from tests.hostile.runner import Begin, Case, nothing

SAME = Mutation("unchanged", "same", False)
REFUSED = Mutation("must be refused", "same", True)


def variable(name: str, value: str | None) -> Begin:
    """Set a variable of the environment, or take it away."""

    def begin() -> Callable[[], None]:
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
        return lambda: None

    return begin


def closed_pipe() -> Callable[[], None]:
    """Let standard output be a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    return lambda: None


def closed_output() -> Callable[[], None]:
    """Close standard output, as `>&-` does."""
    os.close(1)
    sys.stdout = None
    return lambda: None


def ascii_output() -> Callable[[], None]:
    """Let standard output and error take ASCII alone."""
    sys.stdout = open(1, "w", encoding="ascii", closefd=False)
    sys.stderr = open(2, "w", encoding="ascii", errors="backslashreplace", closefd=False)
    return lambda: None


def full_output() -> Callable[[], None]:
    """Let standard output be a full device."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    return lambda: None


def binary_input() -> Callable[[], None]:
    """Let standard input be bytes that are no text."""
    reader, writer = os.pipe()
    os.write(writer, bytes(range(128, 256)))
    os.close(writer)
    os.dup2(reader, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    return lambda: None


def environments(commands: dict[str, tuple[str, ...]]) -> list[Case]:
    """Return the cases.

    Args:
        commands: words of "generate", "plan" and "build-ngrams".
    """
    generate, plan, count = commands["generate"], commands["plan"], commands["build-ngrams"]
    piped = tuple("-" if word == "Hi" else word for word in generate)
    at = count.index("--out") + 1
    cases = [
        Case("generate", "no HOME", SAME, generate, variable("HOME", None)),
        Case("generate", "HOME is no folder", SAME, generate, variable("HOME", "/dev/null")),
        Case("generate", "LANG=C", SAME, generate, variable("LC_ALL", "C")),
        Case("generate", "threads are no number", SAME, generate, variable("OMP_NUM_THREADS", "many")),
        Case("generate", "closed pipe", SAME, generate, closed_pipe),
        Case("generate", "closed output", SAME, generate, closed_output),
        Case("generate", "full output", SAME, generate, full_output),
        Case("generate", "ASCII output", SAME, generate, ascii_output),
        Case("plan", "ASCII output", SAME, plan, ascii_output),
        Case("plan", "closed pipe", SAME, plan, closed_pipe),
        Case("generate", "binary input", REFUSED, piped, binary_input),
        Case("generate", "empty input", REFUSED, piped, nothing),
    ]
    for name, value in (("a file", "/dev/null"), ("below a file", "/dev/null/x"), ("empty", "")):
        cache = variable("DRAFTTRAIN_CACHE", value)
        cases += [
            Case(command, f"cache is {name}", SAME, words, cache)
            for command, words in (("generate", generate), ("plan", plan), ("build-ngrams", count))
        ]
    for name, place in (
        ("a newline", "{out}/a\nb"),
        ("spaces", "{out}/a b "),
        ("not UTF-8", "{out}/a\udcff"),
        ("other letters", "{out}/ä日本"),
        ("a dash", "{out}/-x"),
        ("brackets", "{out}/[red]x"),
    ):
        cases.append(Case("build-ngrams", f"path with {name}", SAME, (*count[:at], place), nothing))
    for name, place in (
        ("NUL", "{out}/a\0b"),
        ("a long name", "{out}/" + "a" * 300),
        ("a file on its way", "{world}/recipe.yaml/x"),
        ("a device", "/dev/null"),
        ("nothing", ""),
    ):
        cases.append(Case("build-ngrams", f"path with {name}", REFUSED, (*count[:at], place), nothing))
    return cases
