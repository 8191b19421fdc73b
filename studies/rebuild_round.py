"""Measure one round of decoding, training or regenerating with the package in PYTHONPATH.

`studies/rebuild_speed.py` runs it in a process of its own, with the package of a commit before the rebuild
and with the present one; so it imports nothing of studies, and what has moved by its place in either.

    python studies/rebuild_round.py decode|train|regenerate before|after FOLDER

Prints one JSON object: tokens per second by kind of work.
"""

import importlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent  # data and bundle are the same for both
HOMES = {
    "before": {
        "main": "drafttrain.cli:main",
        "RegenerateConfig": "drafttrain.corpus.config:RegenerateConfig",
        "Source": "drafttrain.corpus.config:Source",
        "answer": "drafttrain.corpus.regenerate:answer_anew",
        "load_target": "drafttrain.target.loading:load_target",
    },
    "after": {
        "main": "drafttrain.run.cli:main",
        "RegenerateConfig": "drafttrain.data.config:RegenerateConfig",
        "Source": "drafttrain.data.config:Source",
        "answer": "drafttrain.regenerate.stage:answer_conversations",
        "load_target": "drafttrain.target_lm.loading:load_target",
    },
}
TARGET, DTYPE = "smollm2-135m-instruct", "bfloat16"
BUNDLE = ROOT / "model_cards/smollm2-135m-edd"
CHATS = ROOT / "data/train/conversations.jsonl"
TREE = "eagle2:top_k=3,max_depth=4,total=8"  # depends on no calibration
PROMPTS, NEW_TOKENS = 6, 96
CONVERSATIONS, STEPS, ROWS, ROW_LENGTH = 100, 6, 4, 512
ANSWERS, ANSWER_TOKENS = 16, 64


def home(side: str, name: str) -> Any:
    """Return a function or class from its module in the package of one side."""
    module, _, attribute = HOMES[side][name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def decode(side: str, folder: Path) -> dict[str, float]:
    """Decode first turns of MT-bench greedily, one after the other, with drafts and without."""
    from drafttrain import SpeculativeDecoder

    rows = [json.loads(line) for line in open(ROOT / "data/eval/mt_bench.jsonl", encoding="utf-8")]
    prompts = [row["turns"][0] for row in rows[:: len(rows) // PROMPTS][:PROMPTS]]
    decoder = SpeculativeDecoder.from_pretrained(str(BUNDLE), dtype=DTYPE, tree=TREE)
    rates = {}
    for kind, run in (("drafted", decoder.generate), ("plain", decoder.autoregressive)):
        run(prompts[0], 8)  # the first forwards of a process are slow
        started = time.perf_counter()
        n_tokens = sum(len(run(prompt, NEW_TOKENS).token_ids) for prompt in prompts)
        rates[kind] = n_tokens / (time.perf_counter() - started)
    return rates


def train(side: str, folder: Path) -> dict[str, float]:
    """Train some steps through the command line, over stored states and with the target in each step."""
    rates = {}
    for mode in ("offline", "online"):
        out = folder / mode
        recipe = {
            "target": {"model": TARGET, "dtype": DTYPE},
            "corpus": {
                "sources": [{"path": str(CHATS), "max_conversations": CONVERSATIONS}],
                "max_length": ROW_LENGTH,
            },
            "hidden_states": {"mode": mode},
            "training": {
                "init_from": str(BUNDLE),
                "rows_per_batch": ROWS,
                "row_length": ROW_LENGTH,
                "max_steps": STEPS,
                "logging_steps": 1,
                "eval_prompt_limit": 1,
                "eval_new_tokens": 8,
            },
            "output": str(out),
        }
        path = folder / f"{mode}.yaml"
        path.write_text(json.dumps(recipe))  # YAML holds all of JSON
        shutil.rmtree(out / "drafter", ignore_errors=True)  # corpus and stored states stay
        if home(side, "main")(["run", str(path), "--until", "train"]):
            raise SystemExit(1)
        log = json.loads((out / "drafter/training_log.json").read_text())
        steps = [entry for entry in log if entry.get("tokens_per_second")][1:]  # the first sets up
        rates[mode] = sum(step["tokens"] for step in steps) / sum(
            step["tokens"] / step["tokens_per_second"] for step in steps
        )
    return rates


def regenerate(side: str, folder: Path) -> dict[str, float]:
    """Answer some conversations at once, loading excluded."""
    source = folder / "source.jsonl"
    with open(CHATS, encoding="utf-8") as file:
        source.write_text("".join(next(file) for _ in range(ANSWERS)), encoding="utf-8")
    config = home(side, "RegenerateConfig")(
        sources=[home(side, "Source")(str(source))],
        max_turns=1,
        max_new_tokens=ANSWER_TOKENS,
        max_prompt_tokens=256,
        batch_rows=ANSWERS,
        seed=0,
    )
    target = home(side, "load_target")(TARGET, DTYPE)
    out = folder / "responses"
    shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    report = home(side, "answer")(config, out, target, target.tokenizer)
    return {"regenerate": report.tokens / (time.perf_counter() - started)}


if __name__ == "__main__":
    part, side, place = sys.argv[1:]
    measured = {"decode": decode, "train": train, "regenerate": regenerate}[part](side, Path(place))
    print(json.dumps(measured))
