"""Estimates of large recipes are the arithmetic that the page states, and the recipes are real ones."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from drafttrain import SpeculativeDecoder
from drafttrain.drafters.causal_lm import CausalLmConfig
from drafttrain.run import estimates
from drafttrain.run.cli import main
from drafttrain.run.estimates import fits
from drafttrain.run.recipe import PlanConfig, load_recipe
from drafttrain.utils.errors import UserError

ROOT = Path(__file__).parents[2]
LARGE = sorted((ROOT / "recipes" / "large").glob("*.yaml"))
PLAN = PlanConfig(devices=4, device_memory_gb=80)
TINY = """--target.dtype float32 --regenerate.server null --regenerate.max_rows 6
--regenerate.max_new_tokens 8 --regenerate.max_prompt_tokens 256 --regenerate.batch_rows 4
--regenerate.sources [{path:\xa0data/train/conversations.jsonl,\xa0max_conversations:\xa06}]
--corpus.sources [{path:\xa0data/train/conversations.jsonl,\xa0max_conversations:\xa024}]
--corpus.max_length 500 --corpus.validation_fraction 0.2 --corpus.processes 1 --drafter.draft_vocab_size 128
--training.max_steps 2 --training.rows_per_batch 1 --training.row_length 512 --training.warmup_steps 0
--training.bf16 false --training.eval_prompt_limit 2 --training.eval_new_tokens 4"""
TINY_MEASURING = """--calibrate.rounds 1 --calibrate.max_new_tokens 6 --evaluate.max_new_tokens 6
--calibrate.prompts.limit 2 --evaluate.tune_prompts.limit 2
--evaluate.lossless_new_tokens 6 --evaluate.lossless_prompts 2
--evaluate.prompts [{name:\xa0MT-bench,path:\xa0data/eval/mt_bench.jsonl,limit:\xa02}]
--evaluate.trees [chain:length=2,timed:max_depth=2]"""


def overrides(text: str) -> list[str]:
    """Words of a command line, where a hard space stands for one that does not part them."""
    return [word.replace("\xa0", " ") for word in text.split(" ") for word in word.split("\n") if word]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_fits():
    assert fits(PLAN, 80e9) == " of 80 GB" and fits(PlanConfig(), 1e15) == ""
    assert "MORE than the 80 GB of a device" in fits(PLAN, 81e9)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"devices": 0}, "plan.devices: must be > 0, got 0"),
        ({"device_memory_gb": float("nan")}, "plan.device_memory_gb: must be > 0 and < inf, got nan"),
    ],
)
def test_what_makes_no_sense(settings, expected):
    with pytest.raises(UserError, match=expected):
        PlanConfig(**settings).check()


@pytest.mark.parametrize("name, parameters", [("1b", 1.236e9), ("8b", 8.030e9), ("70b", 70.55e9)])
def test_shapes_of_large_targets(name, parameters):
    [path] = [path for path in LARGE if name in path.stem.split("-")]
    recipe = load_recipe(path)
    target = estimates._target(recipe, {})
    assert sum(p.numel() for p in target.model.parameters()) == pytest.approx(parameters, rel=1e-3)
    assert all(p.device.type == "meta" for p in target.model.parameters())
    assert recipe.export.base_model == recipe.target.model


def test_a_plan_by_hand():
    """Llama 8B: 32 blocks of 218,112,000, a norm of 4,096, embeddings and head of 128,256 x 4,096 each."""
    recipe = load_recipe("recipes/large/llama-8b-8gpu.yaml")
    folders = {"corpus": Path("nowhere")}
    trained = 218_112_000 + 4096 + 32768 * 4096
    estimate = estimates.train(recipe, folders)
    assert estimate["parameters"].startswith(f"{trained / 1e6:.3g} M trained")
    tokens = -(-150_000_000 * 2 // (8 * 4 * 2048)) * 8 * 4 * 2048
    assert estimate["tokens"] == f"planned {tokens / 1e6:.3g} M" and "hours" not in estimate
    recipe.hidden_states.mode = "offline"
    disk = 150_000_000 * (2 * 2 * 4096 + 4)  # two states of bf16 and an id
    assert float(estimates.collect(recipe, folders)["disk"].split()[1]) == pytest.approx(disk / 1e9, rel=0.01)
    # both copies in fp32, while outputs are compared
    fp32 = 2 * 4 * (32 * 218_112_000 + 4096 + 2 * 128_256 * 4096)
    assert estimates.evaluate(recipe, folders)["memory"] == f"about {fp32 / 1e9:.2f} GB of 80 GB"


def make_wide(monkeypatch) -> None:
    """A terminal on which no line of a plan is broken. (rich keeps the environment it was imported in.)"""
    monkeypatch.setattr("rich.console.Console._environ", {"COLUMNS": "300"})


def test_what_does_not_fit_is_reported(capsys, monkeypatch):
    make_wide(monkeypatch)
    words = ["run", "recipes/large/llama-70b-64gpu.yaml", "--dry-run", "--plan.device_memory_gb", "80"]
    assert main(words) == 0
    assert "MORE than the 80 GB of a device" in capsys.readouterr().out
    assert main([*words[:3], "--plan.target_config", "nowhere"]) == 2
    assert "plan.target_config: nowhere has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_the_pages_table_is_what_the_dry_run_prints(path, capsys, monkeypatch):
    make_wide(monkeypatch)
    assert main(["run", str(path.relative_to(ROOT)), "--dry-run"]) == 0
    printed = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    page = (ROOT / "docs" / "large_targets.md").read_text(encoding="utf-8")
    [block] = [text for text in page.split("```")[1::2] if text.startswith(f"text\n{path.stem}\n")]
    stated = [line for line in block.split("\n")[2:] if line]
    assert len(stated) > 10
    for line in stated:
        stage, estimate = line[:14].strip(), line[14:]
        assert any(found.startswith(stage) and found.endswith(estimate) for found in printed), line


@pytest.mark.parametrize("name", ["llama-8b-8gpu", "llama-70b-64gpu"])
def test_the_same_recipe_runs_at_the_size_of_a_test(name, tiny_target_folder, tmp_path):
    words = ["--target.model", str(tiny_target_folder), "--output", str(tmp_path / "run")]
    words += overrides(TINY) + (overrides(TINY_MEASURING) if "8b" in name else [])
    assert main(["run", f"recipes/large/{name}.yaml", *words]) == 0
    decoder = SpeculativeDecoder.from_pretrained(str(tmp_path / "run" / "bundle"), dtype="float32")
    prompt = "Could you please explain"
    assert decoder.generate(prompt, 12).token_ids == decoder.autoregressive(prompt, 12).token_ids
    assert (tmp_path / "run" / "bundle" / "eval.json").exists() == ("8b" in name)


def test_a_small_lm_that_was_trained_before(tiny_target_folder, tmp_path):
    """Its folder is a drafter's, whose kind transformers has to know."""
    lm = AutoConfig.from_pretrained(tiny_target_folder)
    CausalLmConfig(lm=lm.to_dict()).save_pretrained(tmp_path)
    found, plain = (estimates._small_lm(str(place)) for place in (tmp_path, tiny_target_folder))
    assert found.num_parameters() == plain.num_parameters() > 0


def test_answers_that_are_still_to_be_given_count(tmp_path):
    """Of prompts alone they are nearly all of a corpus; once they are there, their file says how many."""
    sources = "[{path: data/train/self_prompts.jsonl.gz, max_conversations: 150}]"
    words = [*overrides(TINY), "--plan.corpus_tokens", "null", "--corpus.sources", "[]"]
    words += ["--regenerate.sources", sources, "--regenerate.max_new_tokens", "100", "--regenerate.max_rows"]
    folders = {"regenerate": tmp_path / "regenerated", "corpus": tmp_path / "corpus"}
    for rows, expected in (("null", 150), ("40", 40)):
        recipe = load_recipe("recipes/large/llama-8b-8gpu.yaml", [*words, rows])
        found = estimates.corpus(recipe, folders)["tokens"]
        asked, most = estimates._recipe_tokens(recipe, folders)
        assert most == "at most " and 100 * expected < asked < 200 * expected and found.startswith(most)
    folders["regenerate"].mkdir()
    (folders["regenerate"] / "responses.jsonl").write_text("x" * 11_000)
    assert estimates.corpus(recipe, folders)["tokens"] == "about 1,000"
    assert estimates._corpus_tokens(recipe, {"corpus": tmp_path / "corpus"}) == (1000, "about ")


def test_a_damaged_record_of_the_corpus_is_one_line(tmp_path):
    (tmp_path / "corpus.json").write_text("{}")
    with pytest.raises(UserError, match="corpus.json: damaged"):
        estimates._corpus_tokens(load_recipe("recipes/quickstart.yaml"), {"corpus": tmp_path})
