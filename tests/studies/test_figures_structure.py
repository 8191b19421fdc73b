"""The figures of the structure: the reading of code on small packages, closures and judgement on stubs."""

import contextlib
import importlib
import json
import os
import subprocess
import sys

import pytest

from studies import goals as figures
from studies import rebuild_speed, shape
from studies.goals import Run

RUN = Run("structure", quick=True)


@pytest.fixture
def script(monkeypatch, tmp_path):
    """studies/figures/structure.py, whose raw data go to a temporary folder."""
    module = importlib.import_module("studies.figures.structure")
    monkeypatch.setattr(figures, "check_quiet", lambda refuse: None)
    monkeypatch.setattr(figures, "RAW", tmp_path / "raw")
    return module


@pytest.fixture
def package(tmp_path):
    """a → b → c → b, d alone; c imports b inside a function."""
    files = {
        "__init__.py": "from drafttrain.d import D\n",
        "a/__init__.py": "",
        "a/one.py": "import torch\nfrom drafttrain.a.two import x\nfrom drafttrain.b import y\n",
        "a/two.py": "",
        "b/__init__.py": "from drafttrain import c\n",
        "c.py": "def f():\n    import drafttrain.b.what\n",
        "d.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "drafttrain" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "drafttrain"


def test_imports_between_folders(package):
    assert shape.folder_imports(package) == {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}


def test_cycles(package):
    assert shape.cycles(shape.folder_imports(package)) == [["b", "c"]]
    two = {"a": {"b"}, "b": {"a"}, "c": {"d", "a"}, "d": {"e"}, "e": {"c"}, "f": {"a"}}
    assert shape.cycles(two) == [["a", "b"], ["c", "d", "e"]]
    assert shape.cycles({"a": {"a", "b"}, "b": set()}) == []


def test_lines_and_functions(tmp_path, monkeypatch):
    monkeypatch.setattr(shape, "ROOT", tmp_path)
    path = tmp_path / "x.py"
    path.write_text("# a\n\nclass A:\n    def f(self):\n        return 1\n\n\n@dec\nasync def g(): pass\n")
    assert shape.count_lines([path]) == 9
    assert shape.function_lengths([path]) == {"x.py:4 f": 2, "x.py:9 g": 1}


def test_what_a_program_imports_is_counted():
    found = shape.imported("import sys, drafttrain.utils.errors; assert sys.argv[1:] == ['x']", ["x"])
    assert found.files == [
        "drafttrain/__init__.py",
        "drafttrain/utils/__init__.py",
        "drafttrain/utils/errors.py",
    ]
    assert found.lines == shape.count_lines(shape.ROOT / path for path in found.files)
    assert "json" in found.modules and "torch" not in found.modules


def test_a_program_that_fails_is_no_closure():
    with pytest.raises(shape.UserError, match="import nothing_of_this.*No module"):
        shape.imported("import nothing_of_this")


def test_shape_of_the_package(script, monkeypatch):
    monkeypatch.setattr(script.words, "files", lambda: ["LICENSE", "README.md", "docs/README.md"])
    monkeypatch.setattr(script.words, "hits", lambda path: [1] if path.endswith("E.md") else [])
    found = script.shape(RUN)
    assert found["package_cycles"] == {"value": 0, "cycles": []}
    assert found["package_lines"]["value"] > 10_000 and found["package_lines"]["functions"]["p95"] > 10
    assert {"run", "generate", "benchmark"} <= set(found["commands"]["names"])
    assert found["words"] == {"value": 2, "folders": {".": 1, "docs": 1}}


def test_names_and_goals(script):
    goals = {name: goal for group in script.GROUPS for name, goal in group.goals.items()}
    assert goals == {
        "package_cycles": "== 0",
        "package_lines": "<= 20000",
        "commands": "<= 18",
        "words": "== 0",
        "imports_to_decode": "<= 7000",
        "imports_to_train": "<= 9500",
        "decode_imports": "== 0",
        "first_error_s": "<= 1.5",
        "minimal_recipes": "== 1",
        "decode_speed": ">= 0.98",
        "train_speed": ">= 0.98",
        "regenerate_speed": ">= 0.98",
        "suite_s": "<= 900",
        "suite_s_avx2": "<= 900",
    }


def test_first_error_is_the_slowest_kind_and_one_line(script, monkeypatch):
    monkeypatch.setattr(
        script, "WRONG", {"type": {"training": {"lr": "fast"}}, "key": {"training": {"rate": 1}}}
    )
    found = script.first_error(RUN)["first_error_s"]
    assert found["ok"] and set(found["seconds"]) == {"type", "key"}
    assert found["value"] == max(found["seconds"].values()) > 0


def test_an_error_of_several_lines_is_not_ok(script, monkeypatch):
    monkeypatch.setattr(script, "WRONG", {"key": {"training": {"rate": 1}}})
    monkeypatch.setattr(script, "COMMAND", (sys.executable, "-c", "raise ValueError('no')"))
    found = script.first_error(RUN)["first_error_s"]
    assert not found["ok"] and "status 1" in found["why"]


def test_minimal_recipes_name_those_that_fail(script, monkeypatch):
    read = []

    def run_command(*arguments, cwd):
        recipe = json.loads(json.dumps(script.yaml.safe_load(open(arguments[1]))))
        read.append(recipe)
        if recipe["drafter"]["kind"] == "vdm":
            raise script.UserError("no")

    monkeypatch.setattr(script, "run_command", run_command)
    monkeypatch.setattr(script, "write_tiny_model", lambda folder: None)
    found = script.minimal_recipes(RUN)["minimal_recipes"]
    assert found["value"] == pytest.approx(0.8) and found["failed"] == {"vdm": "no"}
    assert [recipe["drafter"]["kind"] for recipe in read] == found["kinds"]
    assert all(set(recipe) == {"target", "corpus", "drafter"} for recipe in read)
    assert all(set(recipe["corpus"]) == {"sources"} for recipe in read)


def test_the_suite_fails_with_its_tests(script, monkeypatch):
    def run(command, stdout, **options):
        stdout.write("F.\n1 failed, 20 passed, 3 skipped in 700.12s (0:11:40)\n")
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script, "described", lambda environment: {"torch_isa": "AVX2"})
    found = script.suite(RUN)["suite_s"]
    assert found["tests"] == {"failed": 1, "passed": 20, "skipped": 3} and not found["ok"]
    assert set(script.suite(RUN, avx2=True)) == {"suite_s_avx2"}


# before and after


def test_the_kind_that_lost_most_is_the_figure():
    rounds = [
        {"before": {"plain": 100.0, "drafted": 200.0}, "after": {"plain": 90.0 + i, "drafted": 200.0}}
        for i in range(9)
    ]
    found = rebuild_speed.summarize(rounds)
    assert found["value"] == pytest.approx(0.94) and found["interval"] == pytest.approx([0.91, 0.97])
    assert found["works"]["drafted"]["value"] == 1
    assert found["works"]["plain"]["tokens_per_second"] == [100.0, 94.0]


def test_interval_of_a_median():
    assert rebuild_speed.median_interval([3, 1, 2]) is None
    assert rebuild_speed.median_interval([6, 5, 4, 3, 2, 1]) == [1, 6]
    assert rebuild_speed.median_interval(range(20)) == [5, 14]


def test_rounds_alternate_and_are_resumed(monkeypatch, tmp_path):
    asked = []

    def measure_round(part, side, tree, folder):
        asked.append(side)
        return {"plain": 2.0 if side == "after" else 1.0}

    monkeypatch.setattr(rebuild_speed, "measure_round", measure_round)
    monkeypatch.setattr(rebuild_speed, "checkout", lambda commit: contextlib.nullcontext(tmp_path))
    assert rebuild_speed.compare("decode", tmp_path, 2)["value"] == 2
    assert asked == ["before", "after"] + ["after", "before"] + ["before", "after"]
    found = rebuild_speed.compare("decode", tmp_path, 3)
    assert len(asked) == 10 and found["size"] == {"repeats": 3}


def test_a_checkout_is_removed_and_a_missing_commit_is_one_line():
    with rebuild_speed.checkout("HEAD") as tree:
        assert (tree / "drafttrain/__init__.py").exists()
    assert not tree.exists()
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=shape.ROOT, capture_output=True, text=True, check=True
    )
    assert str(tree) not in listed.stdout
    with pytest.raises(rebuild_speed.UserError, match="fetch the whole history"):
        with rebuild_speed.checkout("0" * 40):
            pass


@pytest.mark.parametrize("part", ["decode", "train", "regenerate"])
def test_a_round_with_the_present_package(part, tmp_path, tiny_bundle, tiny_target_folder):
    """The driver in a process of its own, on the tiny target: names of modules, keys and files still hold."""
    sizes = {"PROMPTS": 2, "NEW_TOKENS": 4, "CONVERSATIONS": 8, "STEPS": 3, "ROWS": 1, "ROW_LENGTH": 256}
    sizes |= {"ANSWERS": 2, "ANSWER_TOKENS": 4, "DTYPE": "float32", "TREE": "chain:length=2"}
    places = {"TARGET": str(tiny_target_folder), "BUNDLE": str(tiny_bundle)}
    code = (
        f"import json, sys, pathlib; sys.path.insert(0, {str(shape.ROOT / 'studies')!r})\n"
        f"import rebuild_round as r; vars(r).update({sizes | places!r})\n"
        f"print(json.dumps(r.{part}('after', pathlib.Path({str(tmp_path)!r}))))"
    )
    environment = {**os.environ, "PYTHONPATH": str(shape.ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=shape.ROOT
    )
    assert done.returncode == 0, done.stderr
    rates = json.loads(done.stdout.strip().rpartition("\n")[2])
    kinds = {"decode": {"drafted", "plain"}, "train": {"offline", "online"}, "regenerate": {"regenerate"}}
    assert set(rates) == kinds[part] and all(rate > 0 for rate in rates.values())
