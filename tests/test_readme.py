"""The README's commands and code are run unchanged; only what takes minutes is cut short."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from drafttrain.run.cli import main
from drafttrain.run.recipe import load_recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    words
    for language, block in BLOCKS
    if language == "bash"
    for line in block.split("\n")
    if (words := shlex.split(line, comments=True))
]
# A recipe command is planned, not run: tests/test_recipes.py runs every recipe's tiny twin.
CUT_SHORT = {
    "run": ["--dry-run"],
    "generate": ["--max-new-tokens", "12"],
    "calibrate": ["--limit", "2", "--max-new-tokens", "8", "--rounds", "1"],
    "compare": ["--max-new-tokens", "12"],
}


def test_the_first_screen_has_the_two_scripts_and_nothing_else():
    first = next(block for language, block in BLOCKS if language == "bash")
    assert [line.split()[:2] for line in first.strip().split("\n")] == [
        ["bash", "scripts/quickstart.sh"],
        ["bash", "scripts/test.sh"],
    ]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.usefixtures("hasty_calibration")
def test_command(command, monkeypatch, smollm2, tmp_path):
    monkeypatch.chdir(ROOT)
    program, *arguments = (word.replace("runs/calibration", str(tmp_path)) for word in command)
    if program == "bash":
        subprocess.run(["bash", "-n", *arguments], check=True)
    elif program in ("deepspeed", "torchrun"):  # tests/training starts them for real
        at = arguments.index("scripts/train_drafter.py")
        assert Path(arguments[at]).exists() and arguments[at + 1] == "--config"
        recipe, *overrides = arguments[at + 2 :]
        load_recipe(recipe, ["--training.deepspeed" if o == "--deepspeed" else o for o in overrides])
    else:
        assert program == "drafttrain"
        if "--keys" in arguments:  # prints and exits, like --help
            with pytest.raises(SystemExit):
                main(arguments)
        else:
            assert main([*arguments, *CUT_SHORT.get(arguments[0], [])]) == 0


@pytest.mark.parametrize("block", [block for language, block in BLOCKS if language == "python"])
@pytest.mark.usefixtures("hasty_calibration")
def test_python(block, monkeypatch, smollm2, capsys):
    monkeypatch.chdir(ROOT)
    exec(compile(block.replace('blue?")', 'blue?", 12)'), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
