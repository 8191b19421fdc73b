"""A bundle loads unchanged, decodes exactly, has no weights of the target; its card has the measurements."""

import json
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from drafttrain import SpeculativeDecoder
from drafttrain.bundle import find_bundle, load_bundle
from drafttrain.classifier.model import Classifier
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.drafters.new import new_drafter
from drafttrain.export.config import ExportConfig
from drafttrain.export.write import export
from drafttrain.target_lm.loading import load_target
from drafttrain.utils.errors import UserError

ROW = {
    "prompts": 80,
    "accept_len": 2.046,
    "accept_len_nonrepeated": 1.954,
    "repetition": 0.128,
    "tokens_per_second": 51.26,
    "speedup": 1.493,
    "speedup_transformers": 1.712,
}
EVALUATION = {
    "tree": "chain:length=3",
    "dtype": "bfloat16",
    "threads": 2,
    "tasks": {"MT-bench": ROW, "all": {**ROW, "accept_len": 2.5}},
}
LOG = [
    {"loss": 3.0, "step": 10},
    {"eval_loss": 2.5, "eval_top1_agreement": 0.4, "eval_accept_len": 1.31, "step": 20},
    {"eval_loss": 2.1, "eval_top1_agreement": 0.5, "eval_accept_len": 1.42, "step": 40},
]


@pytest.fixture(scope="module")
def target_folder(tiny_qwen2, tmp_path_factory):
    model, tokenizer = tiny_qwen2
    folder = tmp_path_factory.mktemp("target") / "tiny-qwen"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_folder):
    return load_target(str(target_folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def trained_folder(target, tmp_path_factory):
    """Write what the training stage leaves: `drafter/` and `training_log.json`."""
    folder = tmp_path_factory.mktemp("trained")
    config = DrafterConfig(tapped_blocks=[-2, 0], layers=2, init=-1)
    torch.manual_seed(0)
    drafter = EddModel(EddConfig.for_target(target, config, 300))
    drafter.initialize_from(target, config, torch.arange(300))
    drafter.config.training = {
        "optimizer": "muon",
        "processes": 2,
        "corpus_files": [{"name": "chats.json", "conversations": 7, "sha256": "ab12"}],
        "steps": 40,
        "tokens": 81920,
        "corpus_tokens": 40000,
        "seconds": 90.0,
        "lr": 2e-3,
        "schedule": "cosine",
        "rows_per_batch": 4,
        "row_length": 1024,
        "max_length": 512,
        "gradient_accumulation_steps": 2,
        "block_length": [5, 10],
        "eval_prompt_limit": 16,
        "seed": 7,
    }
    drafter.save_pretrained(folder / "drafter")
    (folder / "training_log.json").write_text(json.dumps(LOG))
    (folder / "eval.json").write_text(json.dumps(EVALUATION))
    return folder


@pytest.fixture
def bundle(trained_folder, tmp_path):
    return export(
        ExportConfig(), trained_folder / "drafter", tmp_path / "bundle", trained_folder / "eval.json"
    )


@pytest.mark.parametrize("prompt", ["Why is the sky blue?", "x", "def main(arguments):\n    for index"])
def test_decodes_what_the_target_generates(prompt, bundle):
    decoder = SpeculativeDecoder.from_pretrained(str(bundle), dtype="float32", device="cpu")
    drafted, plain = (run(prompt, max_new_tokens=40) for run in (decoder.generate, decoder.autoregressive))
    assert drafted.token_ids == plain.token_ids and drafted.text == plain.text
    assert len(plain.token_ids) > 5
    assert drafted.stats.verify_tokens > 0 and plain.stats.verify_tokens == 0


def test_holds_the_drafter_alone_in_bf16(bundle, trained_folder):
    assert sorted(path.name for path in bundle.iterdir()) == [
        "README.md",
        "card.json",
        "config.json",
        "custom_generate",
        "eval.json",
        "model.safetensors",
        "training_log.json",
    ]
    ours, theirs = (
        load_file(bundle / "model.safetensors"),
        load_file(trained_folder / "drafter/model.safetensors"),
    )
    assert ours.keys() == theirs.keys() and "embed_tokens.weight" not in ours
    for name, tensor in ours.items():
        if name == "draft_to_target":
            assert torch.equal(tensor, torch.arange(300))
        else:
            assert torch.equal(tensor, theirs[name].bfloat16())
    config = json.loads((bundle / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["format_version"] == 1
    assert config["target"]["blocks"] == 4 and config["tapped_blocks"] == [2, 0]


def test_loads_with_the_target_it_names(bundle, target_folder, target):
    loaded = load_bundle(bundle, dtype="float32", device="cpu")
    assert loaded.tree == "chain:length=3"
    assert loaded.target.dtype == torch.float32 and loaded.target.tapped_blocks == [2, 0]
    assert loaded.drafter.embed_tokens.weight.dtype == torch.float32 and not loaded.drafter.training
    given = load_bundle(bundle, target=target)
    assert given.target is target and target.tapped_blocks == [2, 0]
    moved = load_bundle(bundle, target=str(target_folder), dtype="bfloat16", device="cpu")
    assert moved.drafter.embed_tokens.weight.dtype == torch.bfloat16


def test_without_an_evaluation(trained_folder, target, tmp_path):
    bundle = export(ExportConfig(), trained_folder / "drafter", tmp_path / "bundle")
    assert load_bundle(bundle, target=target).tree == "chain:length=4"
    assert "Nothing has been measured yet." in (bundle / "README.md").read_text()


def test_a_default_tree_is_no_deeper_than_the_drafter_drafts(target, tmp_path):
    new_drafter(target, DrafterConfig(kind="medusa", heads=2), torch.arange(300)).save_pretrained(tmp_path)
    assert load_bundle(tmp_path, target=target).tree == "chain:length=2"


def test_a_trained_folder_is_a_bundle_too(trained_folder, target):
    for folder in (trained_folder / "drafter", trained_folder):  # the drafter's, and the training stage's
        assert load_bundle(folder, target=target).drafter.draft_vocab_size == 300


def test_card(trained_folder, tmp_path):
    config = ExportConfig(
        name="tiny-edd",
        base_model="someone/tiny",
        license="mit",
        datasets=["responses of the target (data/README.md)"],
        command="drafttrain run recipes/tiny.yaml",
    )
    folder = export(config, trained_folder / "drafter", tmp_path / "bundle", trained_folder / "eval.json")
    card = ModelCard.load(folder / "README.md")
    metadata = card.data.to_dict()
    assert metadata["base_model"] == "someone/tiny" and metadata["license"] == "mit"
    assert metadata["library_name"] == "drafttrain" and "speculative-decoding" in metadata["tags"]
    assert {(r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results} == {
        ("MT-bench", "accept_len"): 2.046,
        ("MT-bench", "speedup"): 1.493,
        ("all", "accept_len"): 2.5,
        ("all", "speedup"): 1.493,
    }
    lines = card.text.splitlines()
    assert "# tiny-edd" in lines
    assert "| MT-bench | 80 | unknown | 2.05 | 1.95 | 13 % | 51.3 | 1.49 | 1.71 | unknown |" in lines
    assert "| all | 80 | unknown | 2.50 | 1.95 | 13 % | 51.3 | 1.49 | 1.71 | unknown |" in lines
    assert "| 20 | 2.500 | 0.400 | 1.31 |" in lines and "| 40 | 2.100 | 0.500 | 1.42 |" in lines
    for words in (
        "2 decoder layers that read the",
        "blocks 2, 0 of 4, counted from 0",
        "over 300 of the target's 512 tokens",
        "Command: `drafttrain run recipes/tiny.yaml`",
        "- responses of the target (data/README.md)",
        "40 optimizer steps over 81920 tokens (40000 distinct) in 1.5 minutes",
        "- muon, learning rate 0.002 (cosine), 8 rows of 1024 tokens per step in each of 2 processes, "
        "blocks of 5 to 10 tokens, seed 7",
        "contexts of up to 512 tokens",
        "- `chats.json`: 7 conversations, sha256 `ab12`",
    ):
        assert words in card.text, words
    tables = [i for i, line in enumerate(lines) if line.startswith("|---")]
    assert len(tables) == 2  # Markdown ends a table at the first line without a bar
    assert all(lines[i + 1].startswith("|") and lines[i + 2].startswith("|") for i in tables)


def test_a_classifier_comes_with_the_bundle(bundle, target, tmp_path):
    with pytest.raises(UserError, match="needs a classifier; .* drafttrain c2t"):
        load_bundle(bundle, target=target).proposer("c2t")
    Classifier(("P", "d"), 3).save(bundle, {})
    loaded = load_bundle(bundle, target=target)
    assert loaded.proposer("c2t:beta=0.3").policy.confidence is loaded.classifier
    Classifier(("P",), 2).save(tmp_path / "other", {})
    other = load_bundle(bundle, target=target, classifier=tmp_path / "other")
    assert other.proposer("c2t_chain").policy.confidence.features == ("P",)
    decoder = SpeculativeDecoder.from_pretrained(str(bundle), target=target, tree="c2t:beta=0.01,max_depth=3")
    plain, drafted = (run("Why?", max_new_tokens=12) for run in (decoder.autoregressive, decoder.generate))
    assert plain.token_ids == drafted.token_ids
    (bundle / "classifier.safetensors").unlink()
    with pytest.raises(UserError, match="classifier.safetensors: cannot be read"):
        load_bundle(bundle, target=target)


# bad input


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_old_bundle_stays_when_export_fails(bundle, trained_folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(trained_folder, broken)
    weights = broken / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    before = contents(bundle)
    with pytest.raises(UserError, match="model.safetensors: cannot be read .* train the drafter again"):
        export(ExportConfig(), broken / "drafter", bundle)
    assert contents(bundle) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "bundle"]  # no leftovers


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_untrained_folder_is_refused(missing, trained_folder, tmp_path):
    shutil.copytree(trained_folder / "drafter", tmp_path / "drafter")
    (tmp_path / "drafter" / missing).unlink()
    with pytest.raises(UserError, match=missing):
        export(ExportConfig(), tmp_path / "drafter", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_the_folder_of_the_stage_train_is_taken_for_the_drafter_in_it(trained_folder, tmp_path):
    """Which is one deeper, beside its log and checkpoints."""
    assert (
        find_bundle(trained_folder) == find_bundle(trained_folder / "drafter") == trained_folder / "drafter"
    )
    assert find_bundle(trained_folder).joinpath("config.json").exists()


def test_what_is_no_bundle_is_refused(target_folder, tmp_path):
    with pytest.raises(UserError, match="no config.json there"):
        find_bundle(tmp_path)
    with pytest.raises(UserError, match="is a small LM, which drafts for any target; name one with --target"):
        load_bundle(target_folder)
    with pytest.raises(UserError, match="no such folder"):
        load_bundle(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(UserError, match=r"no such folder; downloading .* failed \(.*(\w|…)\); see that"):
        load_bundle("nobody/nothing-at-all")  # the suite runs offline


def test_another_target_is_refused(bundle, tiny_llama):
    from drafttrain.target_lm.model import FrozenTarget

    model, tokenizer = tiny_llama
    with pytest.raises(
        UserError, match="another: architecture must be Qwen2ForCausalLM, .*, got LlamaForCausalLM"
    ) as e:
        load_bundle(bundle, target=FrozenTarget(model, tokenizer, "another"))
    assert str(bundle) in str(e.value) and "\n" not in str(e.value)


def test_a_bundle_that_names_no_target_needs_one(bundle, target):
    config = json.loads((bundle / "config.json").read_text())
    del config["target"]["name"]
    (bundle / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no target in config.json; name one with --target"):
        load_bundle(bundle)
    assert load_bundle(bundle, target=target)


def test_damaged_results_and_configs_are_errors(bundle, trained_folder, target, tmp_path):
    (tmp_path / "eval.json").write_text("[]")
    with pytest.raises(UserError, match="eval.json: must be an object"):
        export(ExportConfig(), trained_folder / "drafter", tmp_path / "other", tmp_path / "eval.json")
    (bundle / "eval.json").write_text('{"tree": 5}')
    with pytest.raises(UserError, match="eval.json: tree: must be a text, got 5; give what"):
        load_bundle(bundle)
    (bundle / "eval.json").write_text("[]")
    with pytest.raises(UserError, match="eval.json: must be an object"):
        load_bundle(bundle, target=target)
    config = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps({**config, "target": None}))
    with pytest.raises(UserError, match="does not name its target; export it again"):
        load_bundle(bundle, target=target)


def test_a_vanished_target_is_an_error_with_the_bundle(bundle, tmp_path):
    config = json.loads((bundle / "config.json").read_text())
    config["target"]["name"] = str(tmp_path / "gone")
    (bundle / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="its target cannot be loaded .*; name one .*--target") as e:
        load_bundle(bundle)
    assert str(bundle) in str(e.value) and "\n" not in str(e.value)


def test_an_unusable_dtype_is_not_blamed_on_the_target(tiny_bundle):
    with pytest.raises(UserError, match="^dtype: must be bfloat16 or float32 on a CPU, got float16"):
        load_bundle(tiny_bundle, dtype="float16", device="cpu")
