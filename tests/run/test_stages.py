"""The real stages, joined: a tiny target goes from conversations to a bundle through the command line."""

import copy
import dataclasses
import json
import random
import warnings
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.bundle import load_bundle
from drafttrain.data.config import PromptSet, Source
from drafttrain.data.readers import read_conversations
from drafttrain.drafters.config import KINDS, DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.kernels import dtype
from drafttrain.run import cli, estimates, stages
from drafttrain.run.recipe import load_recipe
from drafttrain.run.recorded import recorded_target
from drafttrain.run.stages import STAGES, drafter_shape
from drafttrain.run.workflow import Workflow
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.utils.errors import UserError

RECIPE = """\
target: {model: tiny, dtype: float32, device: cpu}
corpus: {sources: [{path: chats.json}], max_length: 128, validation_fraction: 0.1}
regenerate:
  sources: [{path: chats.json, max_conversations: 4}]
  max_turns: 1
  max_new_tokens: 8
  max_prompt_tokens: 128
  max_failed: 1
hidden_states: {mode: offline, shard_tokens: 1024}
drafter: {draft_vocab_size: 256, tapped_blocks: [-2]}
training:
  {row_length: 128, rows_per_batch: 2, max_steps: 4, lr: 1e-3, logging_steps: 1, eval_steps: 2, save_steps: 2,
   eval_new_tokens: 4, eval_prompt_limit: 1}
classifier:
  {prompts: {name: own, path: others.jsonl}, max_new_tokens: 200, top_k: 120, max_depth: 1, epochs: 1,
   batch_size: 64}
calibrate: {prompts: {name: own, path: others.jsonl}, rounds: 1, max_new_tokens: 8}
ngrams: {processes: 1}
evaluate:
  {prompts: [{name: own, path: prompts.jsonl}], trees: ["c2t:max_depth=3"], max_new_tokens: 6,
   lossless_prompts: 1, lossless_new_tokens: 6}
"""
OFF = ["--calibrate.prompts", "null", "--evaluate.trees", "[chain:length=1]"]  # what MEDUSA has not
WORDS = (
    "the quick brown fox jumps over a lazy dog while it verifies several tokens in one forward pass".split()
)


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_llama) -> Path:
    """A working folder with a tiny target, conversations, prompts and a recipe over all stages."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny_llama
    model.save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")

    def words() -> str:
        return " ".join(random.choices(WORDS, k=random.randint(5, 12)))

    turns = [[{"from": who, "value": words()} for who in ("human", "gpt")] for _ in range(30)]
    Path("chats.json").write_text(
        json.dumps([{"id": str(i), "conversations": t} for i, t in enumerate(turns)])
    )
    for name in ("prompts.jsonl", "others.jsonl"):
        Path(name).write_text("".join(json.dumps({"id": id, "prompt": words()}) + "\n" for id in "ab"))
    Path("tiny.yaml").write_text(RECIPE)
    return tmp_path


def ran(printed: str) -> list[str]:
    """Names of the stages whose status line says that they ran."""
    names = [stage.name for stage in STAGES]
    lines = [line.split() for line in printed.splitlines()]
    return [line[0] for line in lines if len(line) > 1 and line[0] in names and line[1] == "done"]


def test_states_kept_by_regeneration_are_not_computed_again(folder, capsys):
    """The drafter is that of computed states, up to their rounding."""
    words = ["--regenerate.sources", "[{path: chats.json}]", "--corpus.sources", "[]", "--until", "train"]
    command = ["run", "tiny.yaml", *words]
    runs = [Path("computed/run"), Path("kept/run")]  # apart: a run takes over what those beside it have
    assert cli.main([*command, "--output", str(runs[0])]) == 0
    assert cli.main([*command, "--output", str(runs[1]), "--regenerate.keep_states", "true"]) == 0
    records = [json.loads((run / "hidden_states/stage.json").read_text()) for run in runs]
    reports = [record["figures"] for record in records]
    assert [report["tokens"] for report in reports] == [reports[0]["tokens"]] * 2
    assert reports[0]["reused"] == 0 and reports[1]["reused"] > reports[1]["tokens"] / 2
    logs = [json.loads((run / "drafter/training_log.json").read_text()) for run in runs]
    losses = [[entry["loss"] for entry in log if "loss" in entry] for log in logs]
    assert losses[0] and losses[1] == pytest.approx(losses[0], rel=1e-4)
    capsys.readouterr()
    assert cli.main([*command, "--output", str(runs[1])]) == 0
    assert ran(capsys.readouterr().out) == []  # the answers are the same without
    assert cli.main([*command, "--output", "kept/other", "--until", "regenerate"]) == 0
    other = Path("kept/other/regenerated")
    assert (other / "responses.jsonl").exists()
    shards = sorted((runs[1] / "regenerated/.states").glob("shard-*"))
    assert shards and all(shard.samefile(other / ".states" / shard.name) for shard in shards)
    words = ["--hidden_states.mode", "online", "--regenerate.keep_states", "true", "--until", "regenerate"]
    assert cli.main([*command, "--output", "online/run", *words]) == 0
    assert not Path("online/run/regenerated/.states").exists()


def test_the_home_of_an_unknown_user_is_no_folder():
    assert stages._local("~nobody-here/model") == []


@pytest.mark.parametrize("config", ["[]", '{"model_type": 5}'])
def test_a_folder_without_a_models_config_is_one_line(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("chats.json").write_text("[]")
    Path("target").mkdir()
    Path("target/config.json").write_text(config)
    Path("r.yaml").write_text(
        "target: {model: target}\ncorpus: {sources: [{path: chats.json}], max_length: 64}\n"
    )
    assert cli.main(["run", "r.yaml", "--only", "fetch-target"]) == 2
    assert "target/config.json: must " in capsys.readouterr().err


@pytest.mark.parametrize("record", ["{}", "[]", '{"place": 5}'])
def test_a_damaged_record_of_the_target_is_one_line(record, tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "corpus.json").write_text("{}")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / ".place.json").write_text(record)
    assert cli.main(["corpus", str(tmp_path / "corpus"), "--view", "1"]) == 2
    error = capsys.readouterr().err
    assert ".place.json: damaged" in error and error.count("\n") == 1


def test_all_stages(folder, capsys):
    assert cli.main(["run", "tiny.yaml"]) == 0
    out, err = capsys.readouterr()
    assert ran(out) == [stage.name for stage in STAGES]
    assert "to publish it, set export.base_model" in err and "and export.license" in err
    summary = json.loads(Path("runs/tiny/summary.json").read_text())
    expected = {"accept_len", "speedup", "tokens_per_second", "lossless", "train_tokens", "wall_seconds"}
    expected |= {"train_tokens_per_second"}
    assert expected <= summary.keys() and summary["lossless"] is True and summary["train_tokens"] > 0
    card = Path("runs/tiny/bundle/README.md").read_text()
    assert "Command: `drafttrain run tiny.yaml`" in card and "chats.json" in card
    assert "license: " not in card  # none is invented
    assert json.loads(Path("runs/tiny/bundle/eval.json").read_text())["tree"] == "c2t:max_depth=3"
    files = {p.name for p in Path("runs/tiny/bundle").iterdir()}
    assert {"calibration.json", "costs.png", "classifier.json", "classifier.safetensors"} <= files
    assert {"ngrams.json", "ngrams.bin", "self_draft.json"} <= files
    header = json.loads(Path("runs/tiny/bundle/ngrams.json").read_text())
    assert [source["name"] for source in header["sources"]] == ["responses.jsonl", "chats.json"]
    made = json.loads(Path("runs/tiny/classifier/stage.json").read_text())["figures"]
    assert made["nodes"] == 120 * made["trees"] > 0 and 0 <= made["recall"] <= 1
    loaded = load_bundle("runs/tiny/bundle", dtype="float32")  # its threshold is for its classifier
    assert loaded.proposer().policy.beta == loaded.calibration.beta == loaded.costs.beta

    record = json.loads(Path("runs/tiny/drafter/stage.json").read_text())
    for name in ("anchor", "kv_heads"):  # as a version wrote it that did not know them
        del record["made_from"]["section"]["drafter"][name]
    Path("runs/tiny/drafter/stage.json").write_text(json.dumps(record))
    assert cli.main(["run", "tiny.yaml"]) == 0
    assert ran(capsys.readouterr().out) == []
    assert cli.main(["run", "tiny.yaml", "--export.license", "mit", "--training.logging_steps", "2"]) == 0
    assert ran(capsys.readouterr().out) == ["export"]
    card = Path("runs/tiny/bundle/README.md").read_text()  # of what trained, not of what exported
    assert "license: mit" in card and "Command: `drafttrain run tiny.yaml`" in card
    words = ["--classifier.epochs", "2", "--until", "calibrate"]
    assert cli.main(["run", "tiny.yaml", *words]) == 0
    assert ran(capsys.readouterr().out) == ["classifier", "calibrate"]

    assert cli.main(["corpus", "runs/tiny/corpus", "--view", "1"]) == 0
    assert "trained" in capsys.readouterr().out
    words = ["generate", "--bundle", "runs/tiny/bundle", "--prompt", "the fox", "--max-new-tokens", "12"]
    assert cli.main([*words, "--dtype", "float32"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("accept_len ") and "speedup" in last and last.endswith("same output")
    words = ["benchmark", "--table", "texts", "--method", "runs/tiny/bundle", "--task", "prompts.jsonl"]
    assert cli.main([*words, "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.startswith("2 of 2 outputs are equal in float32")

    words = ["--classifier.epochs", "2", "--evaluate.trees", "[ngram+chain:length=2]"]
    assert cli.main(["run", "tiny.yaml", *words]) == 0
    assert ran(capsys.readouterr().out) == ["evaluate", "export"]
    assert json.loads(Path("runs/tiny/evaluation/summary.json").read_text())["lossless"]["mismatches"] == 0
    joined = load_bundle("runs/tiny/bundle", dtype="float32").proposer()
    assert joined.ngrams.corpus is not None and joined.drafter.policy == ChainPolicy(2)


def test_a_target_that_training_refuses_is_warned_of_at_once(folder):
    config = json.loads(Path("tiny/config.json").read_text())
    Path("tiny/config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    command = ["run", "tiny.yaml", "--only", "fetch-target"]
    refused = "target.model: must be one of llama, .* to train a drafter, got gpt2"
    with pytest.warns(UserWarning, match=refused):
        assert cli.main(command) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken = ["--training.max_steps", "0", "--training.init_from", "drafter", "--output", "runs/taken"]
        assert cli.main([*command, *taken]) == 0


def test_a_hub_target_that_training_refuses_is_warned_of_at_once(folder, monkeypatch):
    config = SimpleNamespace(model_type="gpt2")
    monkeypatch.setattr("drafttrain.target_lm.loading.load_config", lambda place: config)
    command = ["run", "tiny.yaml", "--only", "fetch-target", "--target.model", "someone/gpt2"]
    with pytest.warns(UserWarning, match="to train a drafter, got gpt2"):
        assert cli.main(command) == 0


def test_a_corpus_that_is_made_again_the_same_repeats_nothing(folder, capsys):
    """A file more in `corpus.exclude` changes what the corpus is compared with, not its examples."""
    words = ["run", "tiny.yaml", "--regenerate", "null", "--until", "train"]
    assert cli.main(words) == 0
    capsys.readouterr()
    assert cli.main([*words, "--corpus.exclude", "[others.jsonl]"]) == 0
    assert ran(capsys.readouterr().out) == ["corpus"]
    adjusted = ["--hidden_states.batch_tokens", "512", "--hidden_states.max_skipped", "0.5"]
    assert cli.main([*words, "--corpus.exclude", "[others.jsonl]", *adjusted]) == 0
    assert ran(capsys.readouterr().out) == []


def test_a_corpus_without_a_validation_split_is_refused_at_once(folder, capsys):
    Path("book.txt").write_text(" ".join(WORDS))
    words = ["run", "tiny.yaml", "--regenerate", "null", "--corpus.sources", "[{path: book.txt}]"]
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert "split, got none of 1 examples; split the text into several documents" in captured.err
    assert ran(captured.out) == ["fetch-target"]


def test_nobody_is_measured_on_what_was_trained_on(folder, capsys):
    chats = json.loads(Path("chats.json").read_text())
    rows = [{"id": one["id"], "prompt": one["conversations"][0]["value"]} for one in chats[5:7]]
    Path("seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["run", "tiny.yaml", "--regenerate", "null", "--classifier.prompts", "null", *OFF]
    seen = ["--evaluate.prompts", "[{name: seen, path: seen.jsonl}]"]
    refused = "with a prompt that evaluate.prompts measures on, got 2 with prompts of seen.jsonl (such as"
    assert cli.main([*words, *seen]) == 2
    captured = capsys.readouterr()
    assert refused in captured.err and ran(captured.out) == ["fetch-target"]
    assert cli.main([*words, "--until", "train"]) == 0
    capsys.readouterr()
    for more in ([], ["--training.max_steps", "6"]):  # named when the corpus was there
        assert cli.main([*words, *seen, *more]) == 2
        captured = capsys.readouterr()
        assert refused in captured.err and ran(captured.out) == []
    assert cli.main([*words, *seen, "--corpus.exclude", "[seen.jsonl]"]) == 0


def test_n_grams_hold_nothing_of_measured_prompts(folder, capsys, tiny_bundle):
    chats = json.loads(Path("chats.json").read_text())
    Path("seen.jsonl").write_text(json.dumps({"id": 0, "prompt": chats[5]["conversations"][0]["value"]}))
    words = ["run", "tiny.yaml", "--training.max_steps", "0", "--training.init_from", str(tiny_bundle)]
    words += ["--classifier.prompts", "null", *OFF, "--corpus.sources", "[]"]
    assert cli.main(words) == 2
    assert "ngrams.sources: must be given where training.max_steps is 0" in capsys.readouterr().err
    words += ["--ngrams.sources", "[{path: chats.json}]"]
    seen = ["--evaluate.prompts", "[{name: seen, path: seen.jsonl}]"]
    refused = (
        "ngrams.sources: must hold no conversation with a prompt that evaluate.prompts measures on, got 1 "
    )
    assert cli.main([*words, *seen, "--until", "ngrams"]) == 2
    captured = capsys.readouterr()
    assert refused in captured.err and "add these files to corpus.exclude" in captured.err
    assert "ngrams" not in ran(captured.out) and not Path("runs/tiny/ngrams").exists()
    assert cli.main([*words, "--until", "ngrams"]) == 0
    capsys.readouterr()
    more = ["--ngrams.processes", "2", "--ngrams.memory", "2"]  # nothing is counted again
    assert cli.main([*words, *seen, *more]) == 2  # named when they were there
    captured = capsys.readouterr()
    assert refused in captured.err and ran(captured.out) == []
    assert cli.main([*words, *seen, "--ngrams.exclude", "[seen.jsonl]"]) == 0
    assert "ngrams" in ran(capsys.readouterr().out)


def test_a_drafter_too_weak_for_a_classifier_is_measured_without(folder, capsys):
    words = ["--classifier.top_k", "1", "--classifier.max_new_tokens", "20", "--regenerate", "null"]
    words += ["--evaluate.trees", "['c2t:max_depth=3', 'chain:length=2']"]
    words += ["--evaluate.tune_prompts", "{name: tuning, path: others.jsonl}"]
    assert cli.main(["run", "tiny.yaml", *words]) == 0
    printed = capsys.readouterr().out
    assert (
        "no classifier: runs/tiny/classifier/trees: must hold accepted and rejected nodes, got 0" in printed
    )
    assert ran(printed) == [stage.name for stage in STAGES if stage.name != "regenerate"]
    assert json.loads(Path("runs/tiny/bundle/eval.json").read_text())["tree"] == "chain:length=2"
    assert not Path("runs/tiny/bundle/classifier.json").exists()


def test_a_drafter_is_taken_without_training(folder, capsys, tiny_bundle):
    words = ["--training.max_steps", "0", "--training.init_from", str(tiny_bundle)]
    words += ["--classifier.prompts", "null", "--evaluate.trees", "[chain:length=1]"]
    assert cli.main(["run", "tiny.yaml", *words, "--dry-run"]) == 0
    assert "steps: none, init_from" in capsys.readouterr().out
    assert cli.main(["run", "tiny.yaml", *words]) == 0
    stages = ["fetch-target", "train", "calibrate", "ngrams", "evaluate", "export"]
    assert ran(capsys.readouterr().out) == stages
    assert json.loads(Path("runs/tiny/summary.json").read_text())["train_tokens"] == 0
    assert cli.main(["corpus", "tiny.yaml", *words]) == 2
    assert "corpus: this recipe does not ask for it" in capsys.readouterr().err


def test_one_dtype_for_all_of_a_run(folder, capsys):
    """target.dtype: float32 is that of training, stored states and the bundle, too; without it computing
    takes what is fastest, and files are bf16."""
    words = ["run", "tiny.yaml", "--regenerate", "null", "--classifier.prompts", "null", *OFF]
    words += ["--evaluate.prompts", "[]"]
    for given, used in (("float32", "float32"), ("bfloat16", "bfloat16"), ("auto", "bfloat16")):
        out = Path(f"runs/{given}")
        asked = [*words, "--target.dtype", given, "--output", str(out)]
        assert cli.main(asked) == 0
        assert load_file(out / "bundle/model.safetensors")["norm.weight"].dtype == getattr(torch, used)
        assert json.loads((out / "bundle/config.json").read_text())["dtype"] == used
        assert json.loads((out / "hidden_states/train/manifest.json").read_text())["stored"] == used
        made = json.loads((out / "drafter/stage.json").read_text())["made_from"]["section"]
        assert made["training"]["bf16"] == (used == "bfloat16")
        capsys.readouterr()
        assert cli.main(asked) == 0 and ran(capsys.readouterr().out) == []


def test_tracking_makes_nothing_outdated_and_a_stage_can_be_repeated(folder, capsys):
    words = ["run", "tiny.yaml", "--regenerate", "null", "--until", "train", "--hidden_states.mode", "online"]
    assert cli.main(words) == 0
    tracked = [*words, "--training.report_to", "wandb", "--training.wandb_mode", "offline"]
    assert cli.main(tracked) == 0
    assert ran(capsys.readouterr().out) == ["fetch-target", "corpus", "train"]
    assert cli.main([*tracked, "--again", "train"]) == 0
    assert ran(capsys.readouterr().out) == ["train"]
    assert list(Path("runs/tiny/drafter/.wandb").glob("offline-run-*"))
    assert cli.main(["train", "tiny.yaml", *words[2:4], *words[6:], "--again"]) == 0
    assert ran(capsys.readouterr().out) == ["train"]


def test_a_hopeless_training_is_warned_of(folder, capsys):
    """By the dry run, and by the training before it begins and after its first evaluation."""
    words = ["run", "tiny.yaml", "--regenerate", "null", "--until", "train", "--hidden_states.mode", "online"]
    words += ["--training.lr", "1e-4", "--training.warmup_steps", "9", "--drafter.draft_vocab_size", "5"]
    warnings = ["training.warmup_steps: 9 in", "4 optimizer steps: too few", "training.lr: 0.0001 is too low"]
    assert cli.main([*words, "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(f"WARNING: {warning}" in printed for warning in warnings)
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    warnings += ["of the held-out text is outside", "of the target's probability is outside"]
    assert all(printed.count(warning) == 1 for warning in warnings)


def test_time_was_up_before_the_first_answer(folder, capsys):
    late = ["--regenerate.max_minutes", "1e-9", "--until", "corpus"]
    assert cli.main(["run", "tiny.yaml", *late]) == 0
    captured = capsys.readouterr()
    assert ran(captured.out) == ["fetch-target", "regenerate", "corpus"]
    assert "no answer was finished before regenerate.max_minutes (1e-09)" in captured.err
    assert cli.main(["run", "tiny.yaml", *late, "--corpus.sources", "[]"]) == 2
    assert "corpus.sources: must not be empty where regenerate finished no answer" in capsys.readouterr().err


def test_a_higher_limit_answers_the_others(folder, capsys, monkeypatch):
    """Earlier answers are taken over, and the same limit again changes nothing."""
    from drafttrain.regenerate.rewriting import Rewriting

    asked, request = [], Rewriting.to_request
    monkeypatch.setattr(Rewriting, "to_request", lambda self, one: asked.append(one.id) or request(self, one))
    for limit, new in (("1", 1), ("1", 0), ("3", 2)):
        asked.clear()
        words = ["--regenerate.max_rows", limit, "--regenerate.batch_rows", "1", "--until", "regenerate"]
        assert cli.main(["run", "tiny.yaml", *words]) == 0
        rows = Path("runs/tiny/regenerated/responses.jsonl").read_text().splitlines()
        assert len(rows) == int(limit) and len(asked) >= new and (new or not asked)
    kept = Path("runs/tiny/previous/regenerated-1/responses.jsonl").read_text().splitlines()
    assert set(kept) <= set(rows)


SMALL = """\
target: {model: tiny, dtype: float32, device: cpu}
corpus: {sources: [{path: chats.json}], max_length: 128, validation_fraction: 0.1}
drafter: {kind: causal_lm, model: small, draft_vocab_size: null}
training:
  {row_length: 128, rows_per_batch: 2, max_steps: 4, lr: 3e-4, eval_new_tokens: 4, eval_prompt_limit: 1,
   save_steps: 2, save_total_limit: 1, bf16: false}
"""


@pytest.fixture
def small_recipe(folder, tiny_llama) -> str:
    """A recipe whose drafter is a small LM that predicts almost what the target does."""
    model, tokenizer = copy.deepcopy(tiny_llama[0]), tiny_llama[1]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.002 * torch.randn_like(parameter)
    model.save_pretrained("small")
    tokenizer.save_pretrained("small")
    Path("small.yaml").write_text(SMALL)
    return "small.yaml"


@pytest.mark.parametrize("rank", [None, 4])
def test_a_small_lm_from_recipe_to_decoding(rank, small_recipe):
    """Whole and by adapters: exact greedy output, and the disk that was planned."""
    words = ["--drafter.lora_rank", "null" if rank is None else str(rank)]
    assert cli.main(["run", small_recipe, *words]) == 0
    run = Path("runs/small")
    before, after = load_file("small/model.safetensors"), load_file(run / "bundle/model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[f"lm.{name}"])}
    assert after.keys() == {"draft_to_target", *(f"lm.{name}" for name in before)}
    if rank is None:
        assert {"lm_head.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"} <= changed
    else:  # adapters are at linear maps alone, and not at the head
        assert changed == {name for name in before if "_proj" in name}

    loaded = load_bundle(run / "bundle", dtype="float32")
    prompts = [loaded.target.tokenizer(text)["input_ids"] for text in ("the lazy dog", "First, think about")]
    for policy in (ChainPolicy(4), Eagle2Policy(top_k=3, max_depth=3, total=10)):
        got, stats = decode_all(loaded.target, TreeProposer(loaded.drafter, policy), prompts, 32)
        assert got == decode_all(loaded.target, NoProposer(), prompts, 32)[0]
        assert stats.accept_len > 1.2

    [checkpoint] = (run / "drafter" / "checkpoints").glob("checkpoint-*")
    real = sum(path.stat().st_size for path in checkpoint.iterdir())
    weights = (run / "drafter" / "drafter" / "model.safetensors").stat().st_size
    folders = {name: run / name for name in ("fetch-target", "corpus")}
    planned = estimates.train(load_recipe(small_recipe, words), folders)["disk"]
    assert planned.endswith(" MB")  # of two checkpoints: one is written before the other is deleted
    best = weights  # the same numbers; a better one is written before the other is deleted, too
    assert float(planned.split()[0]) * 1e6 == pytest.approx(2 * real + 2 * best + weights, rel=0.1)


def test_auto_is_settled_for_each_stage(folder, capsys, monkeypatch):
    """A processor that is fast in bf16 for a few rows alone, then one that is not."""
    ms = {"float32": {1: 3.0, 16: 3.0, 128: 3.0}, "bfloat16": {1: 1.0, 16: 1.0, 128: 9.0}}
    monkeypatch.setattr(dtype, "timed", lambda *sizes: dtype.Timings(ms))
    Path("auto.yaml").write_text(RECIPE.replace("dtype: float32, ", "").replace("mode: offline, ", ""))
    run = ["run", "auto.yaml", "--regenerate", "null", "--classifier.prompts", "null", "--ngrams", "null"]
    run += [
        "--training.max_steps",
        "2",
        "--calibrate.prompts",
        "null",
        "--evaluate.trees",
        "[chain:length=1]",
        "--until",
        "evaluate",
    ]
    assert cli.main(run) == 0
    assert ran(capsys.readouterr().out) == ["fetch-target", "corpus", "train", "evaluate"]

    def section(stage: str) -> dict:
        return json.loads(Path(f"runs/auto/{stage}/stage.json").read_text())["made_from"]["section"]

    assert section("drafter")["target"]["dtype"] == "float32"
    assert section("drafter")["training"]["bf16"] is False
    assert section("evaluation")["target"]["dtype"] == "bfloat16"
    summary = json.loads(Path("runs/auto/evaluation/summary.json").read_text())
    assert section("evaluation")["evaluate"]["transformers_dtype"] == "fastest"
    assert summary["transformers"]["tokens_per_second"]
    assert summary["dtype"] == "bfloat16" and summary["lossless"]["dtype"] == "float32"
    drafter = json.loads(Path("runs/auto/drafter/drafter/config.json").read_text())
    assert drafter["training"]["bf16"] is False

    ms["float32"], ms["bfloat16"] = ms["bfloat16"], ms["float32"]
    assert cli.main(run) == 0
    assert ran(capsys.readouterr().out) == []
    assert cli.main([*run, "--training.bf16", "true", "--until", "train"]) == 0
    assert ran(capsys.readouterr().out) == ["train"]
    assert section("drafter")["target"]["dtype"] == "bfloat16"  # made again: as suits now


def test_regeneration_by_a_server_needs_no_dtype():
    stage = next(stage for stage in STAGES if stage.name == "regenerate")
    recipe = SimpleNamespace(regenerate=SimpleNamespace(server="http://somewhere"))
    assert stage.settle(recipe, {}) is recipe


def test_an_own_target_is_an_input(folder):
    """A target folder whose weights change makes everything after it outdated."""
    recipe = load_recipe("tiny.yaml")
    files = set(STAGES[0].files(recipe))
    assert {"tiny/config.json", "tiny/model.safetensors", "tiny/chat_template.jinja"} <= files
    for name in ("recipe.yaml", "chats.jsonl", "report.html"):  # of a user who works there
        Path("tiny", name).write_text("")
    assert set(STAGES[0].files(recipe)) == files
    recipe.target.model = "somebody/on-the-hub"
    assert list(STAGES[0].files(recipe)) == []


def test_states_are_collected_for_the_drafter_that_training_starts_from(folder):
    Path("old").mkdir()
    Path("old/config.json").write_text(
        json.dumps(
            {
                "model_type": "drafttrain_edd",
                "format_version": 1,
                "target": {},
                "layers": 1,
                "tapped_blocks": [1],
            }
        )
    )
    collect = next(stage for stage in STAGES if stage.name == "collect")
    for words, expected in (([], [-2]), (["--training.init_from", "old"], [1])):
        section = collect.section(load_recipe("tiny.yaml", words))
        assert section["drafter"] == {"tapped_blocks": expected}


def test_what_each_stage_reads(folder):
    """Folders come from stages that run earlier and are enabled; files are the recipe's."""
    for text, off in ((RECIPE, set()), (RECIPE.replace("offline", "online"), {"collect"})):
        Path("other.yaml").write_text(text)
        recipe = load_recipe(
            "other.yaml", ["--training.init_from", "old", "--corpus.exclude", "[prompts.jsonl]"]
        )
        earlier = set()
        for stage in STAGES:
            assert stage.enabled(recipe) == (stage.name not in off)
            assert set(stage.needs) <= earlier
            earlier.add(stage.name)
        reads = Workflow(recipe, STAGES).folders(STAGES[4])
        assert reads.keys() == {"fetch-target", "corpus", "collect"} - off
        files = {path for stage in STAGES for path in stage.files(recipe)}
        drafter = {"old/config.json", "old/model.safetensors"}
        target = {str(path) for path in Path("tiny").iterdir()}
        assert files == {"chats.json", "prompts.jsonl", "others.jsonl"} | target | drafter


def test_estimates_take_the_shape_of_what_training_starts_from(folder):
    Path("old").mkdir()
    Path("old/config.json").write_text(
        json.dumps(
            {
                "model_type": "drafttrain_edd",
                "format_version": 1,
                "target": {},
                "layers": 2,
                "draft_vocab_size": 100,
                "tapped_blocks": [1],
            }
        )
    )
    folders = {name: Path("runs/tiny") / name for name in ("fetch-target", "corpus")}
    one, two = (
        estimates.train(load_recipe("tiny.yaml", words), folders)["parameters"]
        for words in ([], ["--training.init_from", "old"])
    )
    assert one == "53.4 k trained, 53.7 k stored" and two == "80.4 k trained, 80.5 k stored"


@pytest.mark.parametrize("kind", ["edd", "medusa"])
def test_heads_of_keys_and_values_of_what_training_starts_from(kind, folder, tiny_llama):
    target = FrozenTarget(*tiny_llama, "tiny")  # with 2 of them
    kv_heads = 4 if kind == "edd" else None
    drafter = DrafterConfig(kind=kind, tapped_blocks=[-2], kv_heads=kv_heads, anchor=kind == "edd")
    new_drafter(target, drafter, torch.arange(100)).save_pretrained("old")
    recipe = load_recipe("tiny.yaml", ["--training.init_from", "old", "--drafter.kind", kind, *OFF])
    shape = drafter_shape(recipe)
    assert (shape.kv_heads, shape.anchor) == (kv_heads, kind == "edd")
    tensors = load_file("old/model.safetensors").values()
    counts = estimates.drafter_parameters(shape, target)
    assert counts[1] == sum(tensor.numel() for tensor in tensors)
    if kind == "edd":
        new_drafter(target, dataclasses.replace(drafter, anchor=False), torch.arange(100)).save_pretrained(
            "plain"
        )
        words = ["--training.init_from", "plain", *OFF]
        for anchor in (False, True):
            asked = load_recipe("tiny.yaml", [*words, "--drafter.anchor", str(anchor).lower()])
            assert drafter_shape(asked).anchor == anchor
    folders = {name: Path("runs/tiny") / name for name in ("fetch-target", "corpus")}
    assert estimates.train(recipe, folders)["parameters"].endswith("stored")


def test_a_drafter_that_the_target_cannot_have_is_refused_before_it_runs(folder, capsys):
    words = ["run", "tiny.yaml", "--dry-run", "--drafter.kv_heads", "3"]
    assert cli.main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "drafttrain: drafter.kv_heads: must divide the 4 heads of tiny (1, 2, 4), got 3"


def test_estimated_downloads(folder, monkeypatch):
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(folder))
    (folder / "targets" / "smollm2-135m-instruct").mkdir(parents=True)
    recipe = load_recipe("tiny.yaml")
    unknown = "unknown: target somebody/on-the-hub is not found here; fetch it or name plan.target_config"
    for model, source, expected in (
        ("SmolLM2-135M-Instruct", "pypi", {"download": "none: in the cache"}),
        ("SmolLM2-135M-Instruct", "hub", {"download": "270 MB"}),
        ("somebody/on-the-hub", "hub", {"parameters": unknown}),
        ("tiny", "pypi", {}),
    ):
        recipe.target.model, recipe.target.source = model, source
        assert estimates.fetch_target(recipe, {}) == expected


def test_estimated_tokens_of_some_conversations(tmp_path):
    turns = [{"from": "human", "value": "four" * 10}, {"from": "gpt", "value": "x", "token_ids": [1] * 20}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text() * 100)
    everything = estimates._source_tokens([Source(str(tmp_path / "a.jsonl"))])
    assert estimates._source_tokens([Source(str(tmp_path / "a.jsonl"), max_conversations=7)]) == 7 * 30
    assert (
        estimates._source_tokens([Source(str(tmp_path / "a.jsonl"), max_conversations=10**6)]) == everything
    )


def test_estimated_tokens_to_decode(folder):
    recipe = load_recipe("tiny.yaml")
    # without a limit, the file is read: a prompt of one turn counts one, however many may be played
    Path("prompts.jsonl").write_text('{"turns": ["a", "b", "c"]}\n{"prompt": "d"}\n')
    recipe.evaluate.prompts[0].turns = 2
    expected = {"prompts": "own all", "tokens per method": f"at most {(2 + 1) * 6}"}
    assert estimates.evaluate(recipe, {}) == expected
    recipe.evaluate.prompts = [PromptSet("one", "x", limit=3), PromptSet("two", "x", limit=5, turns=2)]
    recipe.evaluate.repeats, recipe.evaluate.max_new_tokens = 2, 100
    assert estimates.evaluate(recipe, {})["tokens per method"] == "at most 2,600"


def test_what_is_not_found_is_reported(folder):
    folders = {name: Path("runs/tiny") / name for name in ("fetch-target", "corpus")}
    recipe = load_recipe("tiny.yaml", ["--target.model", "nowhere/at-all"])
    unknown = "unknown: target nowhere/at-all is not found here; fetch it or name plan.target_config"
    assert estimates.train(recipe, folders)["parameters"] == unknown
    recipe.plan.target_config = "tiny"
    assert estimates.train(recipe, folders)["parameters"].endswith("stored")
    recipe.drafter = DrafterConfig(kind="causal_lm", model="some/lm")
    unknown = "unknown: drafter.model some/lm is not found here"
    assert estimates.train(recipe, folders)["parameters"] == unknown


def test_all_stages_estimate_the_same_corpus(folder):
    """The answers of `regenerate` are in the corpus as well."""
    recipe = load_recipe("tiny.yaml")
    corpus, collected = (
        stage(recipe, {"corpus": Path("no")}) for stage in (estimates.corpus, estimates.collect)
    )
    own, config = estimates._source_tokens(recipe.corpus.sources), recipe.regenerate
    [source] = config.sources
    turns = sum(
        min(sum(message.role == "user" for message in chat.messages), config.max_turns)
        for chat in islice(read_conversations(source.path, source.format), source.max_conversations)
    )
    most = estimates._count(estimates._recipe_tokens(recipe, {"corpus": Path("no")})[0])
    assert corpus["tokens"] == collected["tokens"] == f"at most {most}"
    found = estimates._recipe_tokens(recipe, {"corpus": Path("no")})[0] - own
    assert turns * config.max_new_tokens < found < turns * (config.max_new_tokens + 60)


def test_estimated_trees(folder):
    recipe = load_recipe("tiny.yaml")
    rows = 2 * 200 * 120
    assert estimates.classifier(recipe, {}) == {
        "prompts": "own all",
        "trees": "at most 400",
        "rows": f"at most {rows / 1e3:g} k",
        "disk": "at most 0.9 MB, less as it is compressed",
    }
    recipe.drafter.draft_vocab_size, recipe.target.model = None, "somebody/on-the-hub"
    assert estimates.classifier(recipe, {}).keys() == {"prompts", "trees"}  # the size is the target's
    assert estimates.calibrate(recipe, {})["decoded"] == "15 times each"
    recipe.classifier.prompts = None
    assert estimates.calibrate(recipe, {})["decoded"] == "6 times each"


def test_target_of_a_corpus(folder):
    with pytest.raises(UserError, match="nowhere/corpus: no corpus here"):
        recorded_target("nowhere/corpus")
    Path("alone").mkdir()
    Path("alone/corpus.json").write_text("{}")
    with pytest.raises(UserError, match="give it with --target"):
        recorded_target("alone")


@pytest.mark.parametrize("rank", [None, 4])
def test_estimates_of_a_small_lm_are_those_of_the_model(rank, small_recipe, tiny_llama, monkeypatch):
    """Gradients and moments are only of what is trained; the other weights stay in memory and checkpoints."""
    monkeypatch.setattr(estimates, "_bytes", str)
    target = FrozenTarget(*tiny_llama, "tiny")
    settings = DrafterConfig(kind="causal_lm", model="small", lora_rank=rank, draft_vocab_size=100)
    drafter = new_drafter(target, settings, torch.arange(100))
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in drafter.parameters()) - trained
    drafter.finish()
    stored = sum(p.numel() for p in drafter.parameters()) + 100
    assert estimates.drafter_parameters(settings, target) == (trained, stored)
    assert (rank is None) == (trained + 100 == stored)

    words = ["--drafter.lora_rank", "null" if rank is None else "4", "--drafter.draft_vocab_size", "100"]
    estimate = estimates.train(load_recipe(small_recipe, words), {"corpus": Path("nowhere")})
    logits = 4 * 4 * 256 * 100 + 4 * 256 * 512
    activations = 4 * 12 * 4 * 64 * 2 * 128  # 4 layers of width 64, 2 rows of 128 tokens
    target_bytes = 4 * sum(p.numel() for p in target.model.parameters())
    memory = target_bytes + 16 * trained + 4 * frozen + logits + activations
    near = pytest.approx(memory, abs=4 * 100)  # the map of the vocabulary
    assert float(estimate["memory"].removeprefix("about ")) == near
    disk = 2 * (4 * (trained + frozen) + 8 * trained) + 12 * stored
    assert float(estimate["disk"]) == pytest.approx(disk, abs=4 * 3 * 100)

    if rank is not None:  # a drafter that is trained further has its adapters merged, and is trained whole
        drafter.save_pretrained("old")
        recipe = load_recipe(small_recipe, ["--training.init_from", "old"])
        whole = estimates.drafter_parameters(drafter_shape(recipe), target)
        assert whole == (stored - 100, stored)


@pytest.mark.parametrize(
    "drafter",
    [
        DrafterConfig(draft_vocab_size=100),
        DrafterConfig(draft_vocab_size=None, layers=2, train_head=False),
        DrafterConfig(draft_vocab_size=64, tapped_blocks=[-2, -4], train_embeddings=True),
        DrafterConfig(draft_vocab_size=64, tapped_blocks=[-2, -4], anchor=True, kv_heads=4),
        *(DrafterConfig(kind, draft_vocab_size=64) for kind in KINDS if "model" not in KINDS[kind].settings),
        DrafterConfig(draft_vocab_size=64, kind="vdm", kv_heads=1),
        DrafterConfig(draft_vocab_size=64, kind="eagle", input_norms=True, train_head=False),
        DrafterConfig(draft_vocab_size=64, kind="medusa", heads=3),
    ],
)
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2"])
def test_estimated_parameters_are_those_of_the_model(drafter, family, request, tmp_path):
    target = FrozenTarget(*request.getfixturevalue(family), "tiny")
    new_drafter(target, drafter, torch.arange(drafter.draft_vocab_size or 512)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors").values()
    trained = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
    stored = sum(tensor.numel() for tensor in tensors)
    assert estimates.drafter_parameters(drafter, target) == (trained, stored)
