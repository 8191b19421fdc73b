"""The command line: quick help, overrides, and mistakes that end in one line and exit status 2."""

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

import drafttrain.run.stages  # noqa: F401 - some libraries print while they are imported: let it be before a test
from drafttrain.run import cli, help, tools, workflow
from drafttrain.run.recipe import load_recipe
from drafttrain.utils.errors import UserError

ROOT = Path(__file__).parents[2]
RECIPE = "target: {model: here}\ncorpus: {sources: [{path: chats.json}], max_length: 256}\n"
HELP = """\
usage: drafttrain COMMAND [options]

Trains drafters for speculative decoding and measures them.

start:
  quickstart     measure this machine, and train and measure in some minutes
  new-recipe     write a short recipe for your own model and chats

train, by a recipe:
  run            run all stages of a recipe, skipping what is up to date
  fetch-target   fetch or convert a target model and print its folder
  regenerate     let the target rewrite the answers of conversations
  corpus         turn conversations into token ids and loss masks
  collect        store the target's hidden states, to train offline
  train          train the drafter
  export         bundle the drafter, or write it for other tools

make decoding faster:
  calibrate      measure what drafting and verifying cost here
  c2t            grow labelled trees and train the C2T classifier
  build-ngrams   count the n-grams of a text, for Self-Draft

use and measure:
  generate       generate text, each iteration's tokens in their own color
  reason         grow trees of thoughts for the problems of a task
  pipeline       decode with a target that is spread over processes
  benchmark      measure drafting methods against plain decoding
  report         write one HTML page with the figures of measurements
  push           publish a bundle on the Hugging Face Hub

drafttrain COMMAND --help lists its options.
"""


def python(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("WANDB_MODE", None)  # it makes a library say so on standard output
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=cwd, env=environment, timeout=600
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


@pytest.mark.parametrize("command", ["generate", "benchmark", "report"])
def test_calibration_is_a_folder(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "--calibration DIR folder of calibrate, for pct, timed and c2t" in printed


@pytest.mark.parametrize("command", ["generate", "report"])
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


def test_the_first_help(capsys):
    """All commands in the order of work, on one screen."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0 and capsys.readouterr().out == HELP
    assert HELP.count("\n") <= 40 and max(map(len, HELP.split("\n"))) <= 80
    assert len(cli.COMMANDS) <= 18


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_each_command_fits_a_screen_and_has_an_example(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0 and f"example:\n  drafttrain {name} " in text
    assert text.count("\n") <= 45
    options = [line.split()[0].rstrip(",") for line in text.split("\n") if line.startswith("  --")]
    assert len(set(options)) == len(options)


@pytest.mark.parametrize("name", help.REMOVED)
def test_a_removed_command_names_its_replacement(name, capsys):
    """The replacement is a command that exists, with options that it has."""
    assert cli.main([name, "whatever", "--limit", "3"]) == 2
    line = one_line(capsys)
    assert line == f"drafttrain: {name}: is now drafttrain {help.REMOVED[name]}\n"
    command, *words = help.REMOVED[name].split()
    values = {"N": "1", "FORMAT": "eagle", "...": "timed"}
    args = cli.parse([command, *(values.get(word, word) for word in words)])
    assert args.command == command


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], "COMMAND: must be one of 18, got none; see drafttrain --help"),
        (["trian"], "COMMAND: must be one of 18, got trian; did you mean train?"),
        (["x"], "COMMAND: must be one of 18, got x; see drafttrain --help"),
        (["run"], "the following arguments are required: RECIPE"),
        (["run", "nowhere.yaml"], "nowhere.yaml: no such recipe file"),
        (["quickstart", "--minutes", "0"], "--minutes: must be >= 2 and finite, got 0; 2 is enough for"),
        (["run", "x" * 300], "x: File name too long; name another recipe file"),
        (["run", "small.yaml", "--training.lrr", "1"], "unknown key training.lrr; did you mean training.lr?"),
        (
            ["train", "small.yaml", "--training.lr", "fast"],
            "small.yaml: training.lr: must be a number, got fast",
        ),
        (
            ["train", "small.yaml", "--training.lr"],
            "--training.lr: must be an option or have a value, got none",
        ),
        (
            ["run", "small.yaml", "--only", "train", "--from", "corpus"],
            "--only: must be given without --from and --until, got train",
        ),
        (["run", "small.yaml", "more"], "more: expected an override such as --training.lr 1e-3, got more"),
        (["run", "small.yaml", "--from", "nothing"], "nothing: no such stage; there are fetch-target, "),
        (["regenerate", "small.yaml"], "regenerate: this recipe does not ask for it"),
        (["export", "small.yaml"], "export needs it; run the stage fetch-target first"),
        (["generate", "--bundle", "x"], "the following arguments are required: --prompt"),
        (
            ["generate", "--bundle", "x", "--prompt", "y", "--max-new-tokens", "-1"],
            "--max-new-tokens: must be a whole number >= 1, got -1",
        ),
        (["generate", "--prompt", "y"], "--bundle: must be given"),
        (
            ["generate", "--bundle", "x", "--prompt", "y", "--top-p", "0"],
            "--top-p: must be > 0 and <= 1, got 0",
        ),
        (["generate", "--bundle", "x", "--prompt", "y", "--top-p", "a"], "--top-p: must be a number, got a"),
        (
            ["generate", "--bundle", "x", "--prompt", "y", "--ngrams", "z", "--tree", "timed"],
            "--ngrams: must come with --tree ngram or ngram+POLICY, got --tree timed",
        ),
        (
            ["generate", "--bundle", "x", "--prompt", "y", "--tree", "ngram:budget=4"],
            "tree 'ngram:budget=4': must be ngram without settings, got budget=4",
        ),
        (["generate", "--bundle", "x", "--prompt", "y", "--lenght", "1"], "unexpected argument --lenght"),
        (["fetch-target", "no-such-model"], "no-such-model: neither "),
        (["c2t", "--trees", "nowhere", "--out", "x"], "nowhere: no trees.json here"),
        (["c2t", "--trees", "x", "--out", "y", "--features", "P,Q"], "--features: must be some of P,H,d"),
        (["c2t", "--trees", "x"], "--out: must be given, got none"),
        (["c2t", "--out", "x"], "BUNDLE: must be given without --trees, got none"),
        (["c2t", "x", "--out", "y"], "the following arguments are required: --prompts"),
        (
            ["c2t", "--trees", "x", "--out", "y", "--top-k", "3"],
            "--top-k: must be left out without BUNDLE, got 3",
        ),
        (["c2t", "x", "--trees", "y", "--prompts", "z", "--lr", "1"], "--lr: must be left out without --out"),
        (
            ["c2t", "--trees", "x", "--out", "y", "--from", "z", "--hidden", "3"],
            "--hidden: must be left out with",
        ),
        (["calibrate", "x"], "--prompts, --quick: exactly one must be given, got neither"),
        (["calibrate", "x", "--quick", "--prompts", "y"], "exactly one must be given, got both"),
        (["calibrate", "x", "--prompts", "y", "--limit", "1"], "--limit: must be >= 2, got 1; give some"),
        (["calibrate", "x", "--quick", "--ngrams", "y"], "--ngrams: must be left out with BUNDLE, got y"),
        (["calibrate", "--target", "x"], "the following arguments are required: --prompts"),
        (["c2t", "--trees", "x", "--out", "y", "--batch-size", "0"], "--batch-size: must be >= 1, got 0"),
        (
            ["calibrate", "--target", "x", "--prompts", "y", "--quick"],
            "--quick: must be left out without BUNDLE",
        ),
        (["build-ngrams", "--target", "x", "--out", "y"], "SOURCE: must name at least one file"),
        (
            ["build-ngrams", "x", "--target", "x", "--out", "y", "--gram", "1"],
            "--gram: must be >= 2 and <= 16",
        ),
        (["build-ngrams", "x", "--out", "y"], "the following arguments are required: --target"),
        (
            ["benchmark", "--table", "sweep", "--method", "a/x", "--task", "a=y", "--out", "z"],
            "arguments are required: --trees",
        ),
        (
            [
                "benchmark",
                "--table",
                "sweep",
                "--method",
                "lookahead",
                "--task",
                "a=y",
                "--out",
                "z",
                "--trees",
                "t",
            ],
            "--method: must be exactly one with files for this table, got lookahead",
        ),
        (
            ["benchmark", "--table", "texts", "--task", "a=y", "--repeats", "2"],
            "--repeats: must be left out with --table texts, got 2",
        ),
        (
            [
                "benchmark",
                "--method",
                "a/x@timed",
                "--task",
                "a=y",
                "--out",
                "z",
                "--trees",
                "chain:length=2",
            ],
            "--method: must name no tree (@TREE) with --trees, got one of",
        ),
        (
            ["benchmark", "--table", "diagnosis", "--method", "a/x@timed", "--task", "a=y"],
            "--method: must name no tree (@TREE) with --table diagnosis, got one of",
        ),
        (
            [
                "benchmark",
                "--method",
                "lookahead",
                "--task",
                "a=y",
                "--out",
                "z",
                "--trees",
                "chain:length=2",
            ],
            "--trees: must come with a method that is a bundle, got none",
        ),
        (
            ["benchmark", "--table", "diagnosis", "--method", "a/x", "--task", "a=hub:b/c"],
            "--task: must be a file for this table, got hub:b/c",
        ),
        (["benchmark", "--table", "x"], "--table: must be one of speed, texts, diagnosis, sweep, got x"),
        (["benchmark", "small.yaml", "--limit", "2"], "--limit: must be left out with a recipe, got 2"),
        (["benchmark", "--out", "y", "--task", "a=b"], "--target: must be given where no bundle names one"),
        (
            [
                "benchmark",
                "--out",
                "y",
                "--task",
                "a=b",
                "--method",
                "small=x/lm.gguf",
            ],  # which names no target
            "--target: must be given where no bundle names one",
        ),
        (
            ["c2t", "b", "--prompts", "p", "--trees", "t", "--no-baselines"],
            "--no-baselines: must be left out without --out",
        ),
        (["benchmark", "--target", "x", "--out", "y"], "the following arguments are required: --task"),
        (["benchmark", "--target", "x", "--task", "a=b"], "the following arguments are required: --out"),
        (["benchmark", "--target", "x", "--out", "y", "--task", "all"], "--task: must be [NAME=]FILE or "),
        (["benchmark", "--target", "x", "--out", "y", "--task", "z"], "z: no such file or folder"),
        (
            ["benchmark", "--target", "x", "--out", "y", "--task", "a=b", "--method", "edd"],
            "--method: must be [NAME=]BUNDLE[@TREE], ",
        ),
        (["benchmark", "--target", "x", "--out", "y", "--task", "a=b.jsonl"], "b.jsonl: no such file"),
        (["report", "--out", "y"], "FOLDER: must be given, got none; name results, or"),
        (["report", "x"], "the following arguments are required: --out"),
        (["report", "--prompt", "x", "--trace", "y"], "the following arguments are required: --bundle"),
        (["regenerate", "--self-prompts", "3"], "the following arguments are required: --target, --out"),
        (["corpus", "."], "RECIPE: must be a file, got the folder ."),
        (["export", "."], "RECIPE: must be a file, got the folder ."),
        (
            ["export", "x", "--to", "eagle", "--check", "eagle"],
            "--to, --check, --from: exactly one must be given",
        ),
        (["export", "x", "--to", "eagle"], "the following arguments are required: --out"),
        (
            ["export", "small.yaml", "--dtype", "float32"],
            "--dtype: must be left out with a recipe, got float32",
        ),
        (["run", "small.yaml", "--again", "nothing"], "nothing: no such stage; there are fetch-target, "),
        (
            ["run", "--keys", "trainin"],
            "--keys: must be a section or key of a recipe, got trainin; did you mean",
        ),
        (["report", "nowhere", "--out", "y.html"], "nowhere: no such folder; measure with drafttrain"),
        (["push", "x"], "the following arguments are required: --repo"),
        (["push", "x", "--repo", "a/b", "--out", "y"], "--out: must come with --dry-run"),
        (["export", "nowhere", "--to", "card"], "nowhere: no config.json there"),
        (["corpus", "nowhere", "--view", "3"], "nowhere: no corpus here"),
        (["corpus", "nowhere", "--view", "x"], "--view: must be a whole number >= 1, got x"),
        (["corpus", "nowhere", "--view", "3", "--again"], "--again: must be left out with --view, got True"),
        (
            ["regenerate", "--self-prompts", "2", "--target", "x", "--out", "y", "--dry-run"],
            "--dry-run: must be left out without a recipe, got True",
        ),
        (
            ["export", "x", "--to", "eagle", "--out", "y", "--dry-run"],
            "--dry-run: must be left out without a recipe, got True",
        ),
        (["export", "x", "--check", "eagle", "--out", "y"], "--out: must be left out with --check, got y"),
        (
            ["export", "x", "--from", "eagle", "--out", "y", "--dtype", "float32"],
            "--dtype: must be left out with --from, got float32",
        ),
        (
            ["export", "x", "--to", "card", "--target", "y"],
            "--target: must be left out with --to card, got y",
        ),
        (["calibrate", "x", "--quick", "--rounds", "9"], "--rounds: must be left out with --quick, got 9"),
        (
            ["report", "--bundle", "x", "--prompt", "a", "--trace", "t", "--out", "y"],
            "--out: must be left out without FOLDER, got y",
        ),
    ],
)
def test_mistakes(words, expected, folder, capsys):
    assert cli.main(words) == 2
    assert expected in one_line(capsys)


def test_mistake_in_a_real_process():
    done = python("-m", "drafttrain.run.cli", "trian")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("drafttrain: COMMAND: must be one of 18, got trian; did you mean train?")
    assert done.stderr.count("\n") == 1


def test_missing_source_is_found_at_once(folder, capsys):
    (folder / "chats.json").unlink()
    assert cli.main(["run", "small.yaml"]) == 2
    assert "chats.json: no such file; corpus needs it" in one_line(capsys)


@pytest.mark.parametrize(
    "error, status, expected",
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (cli.Terminated(), 143, "terminated; the same command continues where it can"),
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


def test_sigterm_ends_a_run_like_ctrl_c(folder, capsys, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)

    def run(self, **selection):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(workflow.Workflow, "run", run)
    assert cli.main(["run", "small.yaml"]) == 143
    assert "terminated" in one_line(capsys)
    assert signal.getsignal(signal.SIGTERM) is before


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
    from_train, only_train = (1e-3, {"first": "train"}), (1e-3, {"only": "train"})
    until_train = (1e-3, {"last": "train"})
    assert seen == [from_train, from_train, only_train, until_train]


def test_dry_run_writes_nothing(folder, capsys):
    (folder / "chats.json").write_text("x" * 45000)
    assert cli.main(["run", "small.yaml", "--training.row_length", "256", "--dry-run"]) == 0
    table = capsys.readouterr().out
    assert "fetch-target" in table and "tokens: about 10 k" in table and "not made yet" in table
    assert sorted(path.name for path in folder.iterdir()) == ["chats.json", "small.yaml"]


def test_keys(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--keys", "training"])
    text = capsys.readouterr().out
    assert caught.value.code == 0 and "training.lr (float, default 0.0001)\n    " in text
    assert "\n    such as --training.block_length '[5, 10]'\n" in text and "target.model" not in text
    for words, expected, lines in (
        (["--keys"], "corpus (section)\n", 40),
        (["--keys", "target.model"], "target.model (str, required)\n", 2),
        (["--keys", "corpus.sources"], "    such as --corpus.sources '[{path: PATH}]'\n", 12),
        (["--keys", "all"], "regenerate.server.url (str, required)\n", 999),
    ):
        with pytest.raises(SystemExit):
            cli.main(["train", *words])
        text = capsys.readouterr().out
        assert expected in text and text.count("\n") <= lines


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
    "benchmark": "benchmark --target T --task a=b --out O",
    "report": "report --bundle B --prompt P --trace O",
    "calibrate": "calibrate B --prompts P",
    "c2t": "c2t B --prompts P --out O",
}


@pytest.mark.parametrize("command", DTYPE_COMMANDS)
def test_dtype_is_auto_unless_named(command, capsys):
    words = DTYPE_COMMANDS[command].split()
    assert "dtype" not in cli.parse(words)  # the default of what is called
    assert cli.parse([*words, "--dtype", "float32"]).dtype == "float32"
    assert cli.main([*words, "--dtype", "int4"]) == 2
    assert "--dtype: must be one of auto, bfloat16, float32, float16, got int4" in one_line(capsys)


def test_float16_is_refused_on_a_cpu(tiny_bundle, capsys):
    words = ["generate", "--bundle", str(tiny_bundle), "--prompt", "hello", "--dtype", "float16"]
    assert cli.main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "dtype: must be bfloat16 or float32 on a CPU, got float16" in line


def test_a_dtype_that_no_recipe_can_have(folder, capsys):
    assert cli.main(["run", "small.yaml", "--target.dtype", "int4"]) == 2
    line = one_line(capsys)
    assert "target.dtype: must be" in line and "float32" in line and "int4" in line


def test_a_terminal_that_lacks_a_letter_shows_a_question_mark(monkeypatch):
    page = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(page, encoding="ascii"))
    monkeypatch.setattr(cli, "_function", lambda name, suffix="": lambda args: suffix or print("ü 3"))
    assert cli.main(["fetch-target"]) == 0
    sys.stdout.flush()
    assert page.getvalue() == b"? 3\n"


def test_the_end_of_a_line_of_standard_input_is_not_part_of_the_prompt(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Why?\n\nBecause.\n"))
    assert tools._text("-") == "Why?\n\nBecause."


def test_home_is_known_where_the_shell_does_not_write_it(monkeypatch, tmp_path):
    """As after `--out=~/x`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    locks = []
    monkeypatch.setattr("drafttrain.utils.locks.locked", lambda path: locks.append(path) or nullcontext())
    assert cli.main(["c2t", "--trees", "nowhere", "--out=~/x"]) == 2
    assert locks == [str(tmp_path / "x")]
    sources = "corpus: {sources: [{path: a.json}]}"
    (tmp_path / "own.yaml").write_text(f"target: {{model: x}}\noutput: ~/runs/own\n{sources}\n")
    assert load_recipe(tmp_path / "own.yaml").output == str(tmp_path / "runs" / "own")


def test_standard_input_that_is_no_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bytes(range(128, 200))), encoding="utf-8"))
    assert cli.main(["generate", "--prompt", "-", "--target", "anything"]) == 2
    assert capsys.readouterr().err == "drafttrain: standard input: must be text in utf-8, got other bytes\n"
