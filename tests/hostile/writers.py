"""Every command that writes something, on the small world of `cases.py`."""

import itertools
import shutil
from pathlib import Path

from drafttrain.run import stages
from drafttrain.utils.provenance import HASHES, LOCK
from studies import ROOT
from tests.hostile import cases

TARGET = ("--target", "{world}/target", "--dtype", "float32")
BENCHMARK = (
    "--method",
    "{world}/bundle",
    "--task",
    "{world}/prompts.jsonl",
    *TARGET,
    "--max-new-tokens",
    "8",
)
TASKS = ROOT / "recipes/tiny"
WRITERS: dict[str, tuple[str, ...]] = {
    "new-recipe": (
        *("new-recipe", "--target", "{world}/target", "--chats", "{world}/chats.jsonl"),
        *("--out", "{out}/mine.yaml"),
    ),
    "regenerate --self-prompts": (
        *("regenerate", "--self-prompts", "4", *TARGET, "--out", "{out}/self_prompts.jsonl"),
    ),
    "build-ngrams": cases.COMMANDS["build-ngrams"],
    "calibrate": (
        *("calibrate", "{world}/bundle", *TARGET, "--quick"),
        *("--out", "{out}/calibration"),
    ),
    "c2t": (
        *("c2t", "{world}/bundle", "--prompts", "{world}/prompts.jsonl", *TARGET, "--max-new-tokens", "6"),
        *("--top-k", "3", "--max-depth", "3", "--trees", "{out}/trees"),
    ),
    "benchmark": (
        *("benchmark", *BENCHMARK, "--trees", "chain:length=2", "--repeats", "1", "--busy", "warn"),
        *("--out", "{out}/benchmark"),
    ),
    "benchmark --table sweep": (
        *("benchmark", "--table", "sweep", *BENCHMARK, "--trees", "eagle2:total=4", "eagle2:total=6"),
        *("--out", "{out}/sweep"),
    ),
    "report": ("report", "{world}/benchmark", "--out", "{out}/report.html"),
    "report --trace": (
        *("report", "--prompt", "Hi", "--bundle", "{world}/bundle", *TARGET, "--max-new-tokens", "8"),
        *("--trace", "{out}/trace.json"),
    ),
    "export --to card": ("export", "{world}/runs/full/bundle", "--to", "card", "--out", "{out}/README.md"),
    "push --dry-run": (
        *("push", "{world}/runs/full/bundle", "--repo", "user/name", "--dry-run", "--out", "{out}/push"),
    ),
    "reason": (
        *("reason", str(TASKS / "reasoning/gsm8k.yaml"), *TARGET),
        *("--task.path", str(ROOT / "data/eval/gsm8k_test.jsonl.gz"), "--out", "{out}/reason"),
    ),
    "pipeline --simulate": (
        *("pipeline", "--simulate", str(TASKS / "pipeline/simulate.yaml"), "--target", "{world}/target"),
        *("--drafter", "{world}/bundle", "--prompts", "{world}/prompts.jsonl", "--out", "{out}/simulation"),
    ),
}
STAGES = {stage.name: stage.folder for stage in stages.STAGES}
WRITERS |= {
    f"run --only {stage}": ("run", "{world}/full.yaml", "--only", stage, "--output", "{out}/run")
    for stage in STAGES
}


def prepare(name: str, world: Path, out: Path) -> None:
    """Make the folder that a writer writes below; for a stage with the stages before it, as they were."""
    out.mkdir()
    stage = name.removeprefix("run --only ")
    if stage not in STAGES:
        return
    (out / "run").mkdir()
    for name in (HASHES, LOCK):
        shutil.copy(world / cases.FULL / name, out / "run" / name)
    for before in itertools.takewhile(lambda one: one != stage, STAGES):
        shutil.copytree(world / cases.FULL / STAGES[before], out / "run" / STAGES[before])


def words(name: str, world: Path, out: Path) -> list[str]:
    """Return the words of a writer's command line."""
    return [word.format(world=world, out=out) for word in WRITERS[name]]
