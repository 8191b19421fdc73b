"""Imports run one way: from the product's outer layers to its inner ones, and never back."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "drafttrain"
LAYERS = (  # a module imports its own folder and what comes before it; docs/architecture.md explains them
    ("utils",),
    ("kernels",),
    ("trees", "data"),
    ("target_lm",),
    ("drafters",),
    ("inference",),
    ("hidden_states",),
    ("regenerate", "calibration"),
    ("self_draft", "classifier", "training", "reasoning", "pipeline"),
    ("bundle_files",),
    ("hub",),
    ("bundle",),
    ("decoder", "pipeline_decoder", "export"),
    ("custom_generate",),
    ("evaluation",),
    ("report",),
    ("run",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def imports() -> Iterator[tuple[str, str, str]]:
    """Yield each import within the package: file and line, the folder it is in, the folder that it names."""
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):  # those in functions, too
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "drafttrain":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("drafttrain.")]
            for name in names:
                yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno}", own, name.split(".")[1]


def test_every_folder_has_a_layer():
    inside = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert inside - {"__init__"} == set(RANK)


def test_no_import_runs_against_the_order():
    found = list(imports())
    assert len(found) > 500 and {own for _, own, _ in found} >= set(RANK) - {"bundle_files"}
    against = [
        f"{where}: {own} imports {named}"
        for where, own, named in found
        if own != named and own != "__init__" and RANK[named] >= RANK[own]
    ]
    assert not against, "\n".join(against)
