"""The imports before anything runs: by names of modules, as seconds depend on the machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/tiny/quickstart.yaml"
# only what trains, calibrates or reads corpora may take seconds to import these
HEAVY = {"datasets", "deepspeed", "matplotlib", "pandas", "peft", "pyarrow", "sklearn", "wandb"}
QUICK = "import drafttrain.calibration.quick"
MEASURING = [
    f"import drafttrain.{name}" for name in ("run.stages", "evaluation.evaluate", "evaluation.benchmark")
]
COLLECTING = "import drafttrain.regenerate.stage, drafttrain.hidden_states.collect"
AFTER_TORCH = (QUICK, *MEASURING, COLLECTING)
LIBRARIES = HEAVY | {"accelerate", "jsonargparse", "numpy", "rich", "torch", "transformers", "yaml"}


def imported(code: str) -> set[str]:
    """Names of the modules in a fresh process after `code`, whose output does not count."""
    end = "\nimport sys; print('\\nmodules', *sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code + end], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("\nmodules ")[2].split())


IN_FORKS = """
import json, os, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PreTrainedModel
found = {}
for code in sys.argv[1:]:
    reader, writer = os.pipe()
    if not os.fork():
        os.close(reader)
        try:
            exec(code, {})
            os.write(writer, " ".join(sys.modules).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        found[code] = answer.read().split()
    os.wait()
print("modules", json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported_after_torch() -> dict[str, set[str]]:
    """Names of the modules after each of some imports, each the first of the package in its process; torch
    and transformers, which all of them take, are there before."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", IN_FORKS, *AFTER_TORCH],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    found = json.loads(done.stdout.rpartition("modules ")[2])
    assert done.returncode == 0 and all(found.values()), done.stderr
    return {code: set(modules) for code, modules in found.items()}


def ends(*words: str) -> str:
    """Code that runs a command which ends by itself, like --help."""
    return (
        f"from drafttrain.run.cli import main\ntry:\n    main({list(words)})\nexcept SystemExit as end:\n"
        "    assert not end.code"
    )


@pytest.mark.parametrize("words", [["--help"], ["generate", "--help"], ["run", "--help"], ["benchmark"]])
def test_arguments_are_parsed_without_any_library(words):
    assert not imported(ends(*words)) & LIBRARIES


def test_keys_and_mistakes_of_a_recipe_take_neither_torch_nor_a_stage():
    """They are reported within a second."""
    mistakes = [["--training.lr", "fast"], ["--training.lr", "-1"], ["--corpus.max_length", "99999"]]
    mistakes.append(["--evaluate.trees", "[oak]"])
    for words in (["--keys"], *mistakes):
        modules = imported(ends("run", str(RECIPE), *words))
        assert "drafttrain.run.recipe" in modules
        assert not modules & (HEAVY | {"accelerate", "torch", "transformers", "drafttrain.run.stages"})


def test_a_missing_file_is_reported_before_torch_is_imported():
    words = ["run", str(RECIPE), "--corpus.sources", "[{path: no/such/file}]"]
    modules = imported(f"from drafttrain.run.cli import main\nassert main({words}) == 2")
    assert "drafttrain.run.stages" in modules
    assert not modules & (HEAVY | {"accelerate", "torch", "transformers"})


def test_generate_imports_what_decodes(tiny_bundle):
    """transformers itself imports accelerate and scipy where they are installed."""
    words = ["generate", "--bundle", str(tiny_bundle), "--prompt", "Why?", "--max-new-tokens", "4"]
    modules = imported(f"from drafttrain.run.cli import main\nmain({words})")
    assert {"torch", "transformers", "drafttrain.inference.decode"} <= modules
    assert not modules & HEAVY
    packages = ("data.build", "data.readers", "data.streams", "run.recipe", "run.stages", "training")
    packages += ("data.prompts", "evaluation.measure", "evaluation.benchmark", "run.calibrate")
    assert not {f"drafttrain.{name}" for name in packages} & modules


def test_a_kept_calibration_is_found_without_what_makes_one(imported_after_torch):
    """Trees that use costs look for it before the first token."""
    assert "drafttrain.calibration.quick" in imported_after_torch[QUICK]
    assert not imported_after_torch[QUICK] & HEAVY


@pytest.mark.parametrize("code", MEASURING)
def test_what_measures_takes_neither_training_nor_calibration(code, imported_after_torch):
    modules = imported_after_torch[code]
    assert code.split()[1] in modules
    assert not modules & HEAVY
    assert not {"drafttrain.training.train", "drafttrain.run.calibrate"} & modules


def test_decoding_needs_no_compiler(tiny_bundle, tmp_path):
    """No program is in PATH at all."""
    words = ["generate", "--bundle", str(tiny_bundle), "--prompt", "Why?", "--max-new-tokens", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(tmp_path)}
    for name in ("CC", "CXX"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "drafttrain.run.cli", *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0 and "accept_len" in done.stdout, done.stderr


def test_collecting_and_regenerating_take_no_deepspeed(imported_after_torch):
    """Its operators are built with a compiler, and wandb starts a process."""
    modules = imported_after_torch[COLLECTING]
    assert "drafttrain.hidden_states.collect" in modules
    assert not modules & {"deepspeed", "peft", "sklearn", "wandb"}
