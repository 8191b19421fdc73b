"""The package's shape: lines, lengths of functions, imports between folders, imports of a real program."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drafttrain.utils.errors import UserError
from studies import ROOT

PACKAGE = ROOT / "drafttrain"
REPORT = "import json, sys; print('\\n' + json.dumps(sorted(sys.modules)))"


def count_lines(paths: Iterable[Path]) -> int:
    """Return the lines of some files, empty ones and comments included."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def function_lengths(paths: Iterable[Path]) -> dict[str, int]:
    """Return the lines of each function and method, decorators excluded, by "file:line name"."""
    return {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def folder_imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Return the folders and top-level modules of a package, each with those that it imports anywhere."""
    found: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        own = path.relative_to(package).with_suffix("").parts[0]
        if own == "__init__":  # names the homes of what the package offers
            continue
        imports = found.setdefault(own, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            inside = [name.split(".")[1] for name in names if name.startswith(f"{package.name}.")]
            imports.update(name for name in inside if name != own)
    return found


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components with more than one member, each sorted."""
    reached = {name: set(direct) for name, direct in imports.items()}
    for between in imports:  # Warshall's transitive closure
        for direct in reached.values():
            if between in direct:
                direct |= reached[between]
    circles = {
        tuple(sorted(other for other in imports if other in ends and name in reached[other]))
        for name, ends in reached.items()
        if name in ends
    }
    return [list(circle) for circle in sorted(circles) if len(circle) > 1]


@dataclass
class Imported:
    """The modules that a program has imported when it ends.

    Attributes:
        modules: names of all modules.
        files: files of the package among them, from the root.
        lines: lines of these files.
    """

    modules: set[str]
    files: list[str]
    lines: int


def imported(code: str, arguments: Sequence[str] = ()) -> Imported:
    """Run a program in a fresh process and return what it has imported.

    Args:
        code: Python; its `sys.argv[1:]` are the arguments.

    Raises:
        UserError: it fails.
    """
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{REPORT}", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        last = done.stderr.strip().split("\n")[-1]
        raise UserError(f"{code.strip().split(chr(10))[0]}: must end without an error, got {last}")
    modules = set(json.loads(done.stdout.rstrip().rpartition("\n")[2]))
    paths = [path for path in map(module_file, sorted(modules)) if path is not None]
    return Imported(modules, [str(path.relative_to(ROOT)) for path in paths], count_lines(paths))


def module_file(name: str, root: Path = ROOT) -> Path | None:
    """Return the file of a module of the package; None for other modules."""
    place = root.joinpath(*name.split("."))
    if name.split(".")[0] != PACKAGE.name:
        return None
    return next((p for p in (place.with_suffix(".py"), place / "__init__.py") if p.exists()), None)
