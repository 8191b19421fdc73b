"""The command line: quick help, overrides, and mistakes that end in one line and exit status 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import drafttrain.run.stages  # noqa: F401 - some libraries print while they are imported: let it be before a test
from drafttrain.run import cli, workflow
from drafttrain.utils.errors import UserError

ROOT = Path(__file__).parents[2]
COMMANDS = ["run", "quickstart", *cli.RECIPE_COMMANDS, "fetch-target", "view-corpus", "generate"]
COMMANDS += ["build-ngrams", "dump-trees", "train-classifier", "sweep", "benchmark", "trace", "report"]
COMMANDS += ["push", "card", "export-to", "validate", "import-from"]
RECIPE = "target: {model: here}\ncorpus: {sources: [{path: chats.json}], max_length: 256}\n"


def python(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("WANDB_MODE", None)  # it makes a library say so on standard output
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=cwd, env=environment, timeout=120
    )


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with a recipe and its corpus file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(RECIPE)
    (tmp_path / "chats.json").write_text("[]")
    return tmp_path


def one_line(capsys) -> str:
    """Return what was printed: one line on standard error that starts with the program's name."""
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("drafttrain: "), (out, err)
    return err


def test_a_missing_recipe_is_an_error_before_anything_heavy_is_imported():
    code = "import sys; from drafttrain.run.cli import main; print(main(['run', 'nowhere.yaml'])); "
    done = python(
        "-c", code + "print(sorted({'torch', 'transformers', 'yaml', 'rich'} & sys.modules.keys()))"
    )
    assert done.stdout == "2\n[]\n" and done.stderr == "drafttrain: nowhere.yaml: no such recipe file\n"


@pytest.mark.parametrize("command", ["generate", "compare", "trace", "sweep"])
def test_calibration_is_a_folder(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "--calibration DIR folder of calibrate, for pct, timed and c2t" in printed


@pytest.mark.parametrize("command", ["generate", "compare", "benchmark"])
def test_help_names_trees_of_n_grams(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "ngram+timed" in capsys.readouterr().out


def test_help_is_quick_because_nothing_heavy_is_imported():
    code = "import sys; from drafttrain.run.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    done = python(
        "-c", code + "print(sorted({'torch', 'transformers', 'yaml', 'rich'} & sys.modules.keys()))"
    )
    assert done.returncode == 0 and done.stdout.endswith("[]\n"), done.stderr
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0 and f"example:\n  drafttrain {name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["run"], "the following arguments are required: RECIPE"),
        (["run", "nowhere.yaml"], "nowhere.yaml: no such recipe file"),
        (["quickstart", "--minutes", "0"], "--minutes: must be >= 2 and finite, got 0; 2 is enough for"),
        (["run", "x" * 300], "x: File name too long; name another recipe file"),
        (["run", "small.yaml", "--training.lrr", "1"], "unknown key training.lrr; did you mean training.lr?"),
        (
            ["train", "small.yaml", "--training.lr", "fast"],
            "small.yaml: training.lr: expected float, not fast",
        ),
        (["train", "small.yaml", "--training.lr"], "--training.lr needs a value"),
        (["run", "small.yaml", "more"], "unexpected argument more"),
        (["run", "small.yaml", "--from", "nothing"], "nothing: no such stage; there are fetch-target, "),
        (["regenerate", "small.yaml"], "regenerate: this recipe does not ask for it"),
        (["export", "small.yaml"], "export needs it; run the stage fetch-target first"),
        (["generate", "--bundle", "x"], "the following arguments are required: --prompt"),
        (
            ["generate", "--bundle", "x", "--prompt", "y", "--max-new-tokens", "-1"],
            "-1 is not a number from 0 up",
        ),
        (["generate", "--bundle", "x", "--prompt", "y", "--lenght", "1"], "unexpected argument --lenght"),
        (["fetch-target", "no-such-model"], "no-such-model: neither "),
        (["train-classifier", "nowhere", "--out", "x"], "nowhere: no trees.json here"),
        (["train-classifier", "x", "--out", "y", "--features", "P,Q"], "features P,Q: name some of P,H,d"),
        (["build-ngrams", "--target", "x", "--out", "y"], "no source; name at least one file"),
        (["build-ngrams", "x", "--target", "x", "--out", "y", "--gram", "1"], "gram is 1: at least 2"),
        (["build-ngrams", "x", "--out", "y"], "the following arguments are required: --target"),
        (["sweep", "x", "--prompts", "y", "--out", "z"], "arguments are required: --trees"),
        (["benchmark", "--target", "x", "--out", "y"], "the following arguments are required: --task"),
        (["benchmark", "--target", "x", "--out", "y", "--task", "z"], "task 'z': write NAME=FILE"),
        (
            ["benchmark", "--target", "x", "--out", "y", "--task", "a=b", "--method", "edd"],
            "method 'edd': write NAME=BUNDLE",
        ),
        (["benchmark", "--target", "x", "--out", "y", "--task", "a=b.jsonl"], "b.jsonl: no such file"),
        (["trace", "x", "--out", "y"], "the following arguments are required: --prompt"),
        (["report", "nowhere", "--out", "y.html"], "nowhere: no such folder; measure with drafttrain"),
        (["push", "x"], "the following arguments are required: --repo"),
        (["push", "x", "--repo", "a/b", "--out", "y"], "--out is the folder of a dry run"),
        (["card", "nowhere"], "nowhere: no config.json there"),
        (["view-corpus", "nowhere"], "nowhere: no corpus here"),
        (["view-corpus", "nowhere", "--number", "x"], "x is not a number from 0 up"),
    ],
)
def test_mistakes(words, expected, folder, capsys):
    assert cli.main(words) == 2
    assert expected in one_line(capsys)


def test_mistake_in_a_real_process():
    done = python("-m", "drafttrain.run.cli", "trian")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("drafttrain: argument COMMAND: invalid choice: 'trian'")
    assert done.stderr.count("\n") == 1


def test_missing_source_is_found_at_once(folder, capsys):
    (folder / "chats.json").unlink()
    assert cli.main(["run", "small.yaml"]) == 2
    assert "chats.json: no such file; corpus needs it" in one_line(capsys)


@pytest.mark.parametrize(
    "error, status, expected",
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "runs/x"), 2, "runs/x: no space left"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 2, "disk: no space left"),
        (NotADirectoryError(20, "Not a directory", "a.txt/x"), 2, "a.txt/x: Not a directory; choose another"),
        (UserError("what, where, how"), 2, "drafttrain: what, where, how\n"),
    ],
)
def test_how_a_run_can_end(error, status, expected, folder, capsys, monkeypatch):
    def run(self, **selection):
        raise error

    monkeypatch.setattr(workflow.Workflow, "run", run)
    assert cli.main(["run", "small.yaml"]) == status
    assert expected in one_line(capsys)


def test_other_errors_keep_their_traceback(folder, monkeypatch):
    def run(self, **selection):
        raise OSError("something else")

    monkeypatch.setattr(workflow.Workflow, "run", run)
    with pytest.raises(OSError, match="something else"):
        cli.main(["run", "small.yaml"])


def test_options_may_be_anywhere(folder, monkeypatch):
    seen = []
    monkeypatch.setattr(
        workflow.Workflow, "run", lambda self, **selection: seen.append((self.recipe.training.lr, selection))
    )
    assert cli.main(["run", "small.yaml", "--training.lr", "1e-3", "--from", "train"]) == 0
    assert cli.main(["run", "--from", "train", "small.yaml", "--training.lr=1e-3"]) == 0
    assert cli.main(["train", "small.yaml", "--training.lr", "1e-3"]) == 0
    assert cli.main(["run", "small.yaml", "--training.lr", "1e-3", "--until", "train"]) == 0
    nothing = {"first": None, "last": None, "only": None}
    from_train = (1e-3, {**nothing, "first": "train"})
    only_train, until_train = (1e-3, {**nothing, "only": "train"}), (1e-3, {**nothing, "last": "train"})
    assert seen == [from_train, from_train, only_train, until_train]


def test_dry_run_writes_nothing(folder, capsys):
    (folder / "chats.json").write_text("x" * 45000)
    assert cli.main(["run", "small.yaml", "--training.row_length", "256", "--dry-run"]) == 0
    table = capsys.readouterr().out
    assert "fetch-target" in table and "tokens: about 10 k" in table and "not made yet" in table
    assert sorted(path.name for path in folder.iterdir()) == ["chats.json", "small.yaml"]


def test_keys(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--keys"])
    text = capsys.readouterr().out
    assert caught.value.code == 0 and "training.lr (float, default 0.0001)\n    " in text
    assert "target.model (str, required)" in text


def test_launcher_script_takes_what_deepspeed_appends(folder):
    script = str(ROOT / "scripts" / "train_drafter.py")
    words = ["--local_rank=0", "--config", "small.yaml", "--deepspeed", "zero2.json", "--trainin.lr", "1"]
    done = python(script, *words, cwd=folder)
    assert done.returncode == 2
    assert (
        done.stderr == "drafttrain: small.yaml: --trainin.lr: unknown key trainin; did you mean training?\n"
    )


DTYPE_COMMANDS = {
    "generate": "generate --bundle B --prompt P",
    "compare": "compare B --prompts P",
    "sweep": "sweep B --prompts P --trees eagle2 --out O",
    "benchmark": "benchmark --target T --task a=b --out O",
    "trace": "trace B --prompt P --out O",
    "tune-self-draft": "tune-self-draft --target T --prompts P",
    "calibrate": "calibrate B --prompts P",
    "dump-trees": "dump-trees B --prompts P --out O",
}


@pytest.mark.parametrize("command", DTYPE_COMMANDS)
def test_dtype_is_auto_unless_named(command, capsys):
    words = DTYPE_COMMANDS[command].split()
    parser = cli._parser()
    assert parser.parse_args(words).dtype == "auto"
    assert parser.parse_args([*words, "--dtype", "float32"]).dtype == "float32"
    assert cli.main([*words, "--dtype", "int4"]) == 2
    assert "--dtype: invalid choice: 'int4'" in one_line(capsys)


def test_float16_is_refused_on_a_cpu(tiny_bundle, capsys):
    words = ["generate", "--bundle", str(tiny_bundle), "--prompt", "hello", "--dtype", "float16"]
    assert cli.main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "dtype: must be bfloat16 or float32 on a CPU, got float16" in line


def test_a_dtype_that_no_recipe_can_have(folder, capsys):
    assert cli.main(["run", "small.yaml", "--target.dtype", "int4"]) == 2
    line = one_line(capsys)
    assert "target.dtype: expected" in line and "float32" in line and "int4" in line
