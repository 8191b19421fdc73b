"""Recipes: reading, overriding, and errors of one line that name file, key and remedy."""

import json
import re
from pathlib import Path

import pytest

from drafttrain.run.keys import describe_keys
from drafttrain.run.recipe import load_recipe, parse_overrides
from drafttrain.trees.policies import POLICIES, WITH_NGRAMS
from drafttrain.utils.errors import UserError

MINIMAL = """\
target: {model: smollm2-135m-instruct}
corpus:
  sources:
    - path: chats.json
  max_length: 512
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "small.yaml") -> str:
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write


def error_of(path: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(path)
    return message


def test_defaults_and_names(write):
    recipe = load_recipe(write(MINIMAL))
    assert (recipe.name, recipe.output) == ("small", "runs/small")
    assert recipe.regenerate is None and recipe.hidden_states.mode == "online"
    assert recipe.drafter.tapped_blocks == [-4] and recipe.drafter.layers == 1
    assert recipe.training.lr == 1e-4 and recipe.training.block_length == (5, 10)
    assert recipe.corpus.sources[0].path == "chats.json" and recipe.target.dtype == "auto"
    assert recipe.training.bf16 == "auto"
    assert recipe.command == "drafttrain run small.yaml"


def test_values_keep_their_types(write):
    text = MINIMAL + "training: {lr: 1e-3, block_length: [4, 8], max_minutes: 5}\ndrafter: {init: -1}\n"
    recipe = load_recipe(write(text))
    assert recipe.training.lr == 1e-3  # YAML 1.1 reads 1e-3 as text
    assert recipe.training.block_length == (4, 8) and recipe.training.max_minutes == 5.0
    assert recipe.drafter.init == -1 and not isinstance(recipe.drafter.init, str)


def test_overrides(write):
    words = [
        "--training.lr",
        "2e-3",
        "--drafter.tapped_blocks=[-4,-8]",
        "--drafter.init",
        "-2",
        "--seed",
        "3",
    ]
    words += ["--training.row-length", "600", "--output", "elsewhere", "--drafter.draft_vocab_size", "null"]
    recipe = load_recipe(write(MINIMAL), words)
    assert (
        recipe.training.lr == 2e-3 and recipe.drafter.tapped_blocks == [-4, -8] and recipe.drafter.init == -2
    )
    assert recipe.training.row_length == 600 and recipe.output == "elsewhere"
    assert recipe.drafter.draft_vocab_size is None
    assert recipe.command.startswith(
        "drafttrain run small.yaml --training.lr 2e-3 '--drafter.tapped_blocks=[-4,-8]'"
    )


def test_override_replaces_a_list_and_merges_a_section(write):
    text = MINIMAL + "training: {lr: 0.1, epochs: 2}\n"
    recipe = load_recipe(
        write(text), ["--training", "{epochs: 3}", "--corpus.sources", "[{path: other.json}]"]
    )
    assert recipe.training.lr == 0.1 and recipe.training.epochs == 3
    assert [source.path for source in recipe.corpus.sources] == ["other.json"]


def test_sections_by_presence(write):
    text = MINIMAL + "regenerate:\n  sources: [{path: prompts.jsonl}]\n"
    assert load_recipe(write(text)).regenerate.sources[0].path == "prompts.jsonl"
    assert load_recipe(write(text), ["--regenerate", "null"]).regenerate is None
    assert load_recipe(write(MINIMAL + "training:\n")).training.lr == 1e-4  # a key with nothing below it


def test_one_seed_for_all_sections_that_set_none(write):
    recipe = load_recipe(write(MINIMAL + "seed: 5\ntraining: {seed: 9}\n"))
    assert (recipe.corpus.seed, recipe.training.seed) == (5, 9)
    assert load_recipe(write(MINIMAL)).training.seed == 0


@pytest.mark.parametrize(
    "extra, expected",
    [
        ("trainin: {lr: 1}", "unknown key trainin; did you mean training?"),
        ("training: {lrr: 1}", "unknown key training.lrr; did you mean training.lr?"),
        ("lr: 1", "unknown key lr; did you mean training.lr?"),
        ("training: {learning_rate: 1}", "unknown key training.learning_rate; did you mean training.lr?"),
        ("training: {batch_size: 1}", "training.batch_size; did you mean training.rows_per_batch?"),
        ("training: {qqq: 1}", "unknown key training.qqq; known here: optimizer, lr, "),
        (
            "evaluate: {prompts: [{name: a, pth: b}]}",
            "unknown key evaluate.prompts[0].pth; did you mean evaluate.pro",
        ),
        ("command: x", "unknown key command; "),
        ("training: 3", "training: must hold keys, got 3"),
        ("evaluate: {prompts: {name: a}}", "evaluate.prompts: must be a list, got {'name': 'a'}"),
        ("training: {lr: fast}", "training.lr: must be a number, got fast"),
        ("training: {max_steps: 1.5}", "training.max_steps: must be a whole number or null, got 1.5"),
        (
            "training: {block_length: [1, 2, 3]}",
            "training.block_length: must be tuple with 2 elements, got [1, 2, 3]",
        ),
        ("evaluate: {prompts: [{name: a}]}", "missing evaluate.prompts.path"),
        (
            "evaluate: {prompts: [{}]}",
            ".yaml: missing evaluate.prompts.name, evaluate.prompts.path",
        ),
        (
            "evaluate: {prompts: [{name: a, path: b, limit: x}]}",
            "evaluate.prompts.limit: must be a whole number or null, got x",
        ),
        ("seed: 1\nseed: 2", "line 7: key seed is given twice"),
        ("training: {lr: 1, lr: 2}", "line 6: key lr is given twice"),
        ("training: [1", "line 7: not valid YAML ("),
        ("training: {row_length: 256}", "corpus.max_length: must be <= training.row_length 256, got 512"),
        ("regenerate: {}", "regenerate.sources: must not be empty"),
        ("hidden_states: {mode: offlin}", "hidden_states.mode: must be one of online, offline, got offlin"),
        # found before the first stage, not when the stage that reads it begins
        ("training: {lr: -1}", "training.lr: must be > 0, got -1.0"),
        ("drafter: {layers: 0}", "drafter.layers: must be >= 1 and <= 1000, got 0"),
        ("drafter: {tapped_blocks: []}", "drafter.tapped_blocks: must name at least one block"),
        ("drafter: {draft_vocab_size: 0}", "drafter.draft_vocab_size: must be >= 1, got 0"),
        ("drafter: {kv_heads: 0}", "drafter.kv_heads: must be >= 1, got 0"),
        ("drafter: {intermediate_size: 0}", "drafter.intermediate_size: must be >= 1, got 0"),
        ("drafter: {kind: vdm, kv_heads: -1}", "drafter.kv_heads: must be >= 1, got -1"),
        ("drafter: {init: zork}", "drafter.init: must be random or a block"),
        ("hidden_states: {shard_tokens: 0}", "hidden_states.shard_tokens: must be > 0, got 0"),
        ("hidden_states: {max_skipped: 2}", "hidden_states.max_skipped: must be >= 0 and <= 1, got 2"),
        ("plan: {utilisation: 0.5}", "unknown key plan.utilisation; leave it out: --dry-run estimates no h"),
        ("evaluate: {repeats: 0}", "evaluate.repeats: must be >= 1, got 0"),
        ("evaluate: {trees: [chain]}", "tree 'chain': length is missing"),
        ("evaluate: {trees: [timd]}", "evaluate.trees: must be policies out of chain, "),
        (
            "evaluate: {trees: [timed]}",
            "evaluate.trees: must come with calibrate.prompts or calibrate.quick for timed, got none",
        ),
        (
            "drafter: {kind: medusa}\ncalibrate: {prompts: {name: a, path: b}}",
            "calibrate: must be left out for medusa, whose heads cost the same at any depth, got prompts",
        ),
        (
            "drafter: {kind: medusa}\nevaluate: {trees: [timed]}",
            "evaluate.trees: must not depend on costs for medusa, got timed",
        ),
        (
            "drafter: {kind: medusa, heads: 3}\n"
            "evaluate: {prompts: [{name: a, path: b}], trees: ['pct:threshold=0.2,max_depth=4']}",
            "must be at most drafter.heads 3 tokens deep, got pct:threshold=0.2,max_depth=4 with 4",
        ),
        (
            "drafter: {kind: medusa, heads: 3}\nclassifier: {prompts: {name: a, path: b}}",
            "classifier.max_depth: must be <= drafter.heads 3, got 11; set it",
        ),
        (
            "drafter: {kind: medusa, heads: 3}\nclassifier: {prompts: {name: a, path: c}, max_depth: 3}\n"
            "evaluate: {prompts: [{name: a, path: b}], trees: [c2t]}",
            "must be at most drafter.heads 3 tokens deep, got c2t with 10",
        ),
        (
            "evaluate: {trees: ['pct:draft_seconds=0.01']}",
            "must come with calibrate.prompts or calibrate.quick for pct:draft_seconds=0.01, got none",
        ),
        (
            "drafter: {kind: medusa, heads: 3}\n"
            "evaluate: {prompts: [{name: a, path: b}], trees: ['chain:length=4']}",
            "evaluate.trees: must be at most drafter.heads 3 tokens deep, got chain:length=4 with 4",
        ),
        ("evaluate: {trees: [ngram]}", "evaluate.trees: must come with section ngrams for ngram, got none"),
        (
            "ngrams: {}\nevaluate: {trees: [ngram+timed]}",
            "evaluate.trees: must come with calibrate.prompts or calibrate.quick for ngram+timed, got none",
        ),
        (
            "ngrams: {}\nevaluate: {trees: ['ngram+drawn:k_config=2-1']}",
            "tree 'ngram+drawn:k_config=2-1': must be deterministic after ngram+, got drawn; ",
        ),
        ("ngrams: {}\nevaluate: {trees: [ngram+chian]}", "got chian; did you mean chain?"),
        ("ngrams: {}\nevaluate: {trees: [ngram+]}", "got ngram+; choose one of these"),
        (
            "ngrams: {}\nevaluate: {trees: ['ngram:budget=4']}",
            "got ngram; give no settings",
        ),
        (
            "training: {eval_prompts: a}\nevaluate: {trees: [chain], prompts: [{name: x, path: a}]}",
            "training.eval_prompts: must not be among evaluate.prompts, got a; choose on others",
        ),
        ("evaluate: {trees: [ngrams]}", "got ngrams; did you mean ngram?"),
        ("evaluate: {trees: [c2t]}", "evaluate.trees: must come with classifier.prompts for c2t, got none"),
        ("evaluate: {trees: ['c2t:bet=1']}", "did you mean beta"),
        (
            "classifier: {prompts: {name: a, path: b}, hidden: 0}",
            "classifier.hidden: must be >= 1 and <= 16384, got 0",
        ),
        (
            "classifier: {prompts: {name: a, path: b}, top_k: 128}",
            "classifier.top_k: must be >= 1 and <= 127, got 128",
        ),
        ("classifier: {prompts: {name: a, path: b}, features: [Q]}", "features: must be some of P,H,d"),
        ("classifier: {prompts: {name: a, path: b, turns: 2}}", "classifier.prompts: turns must be 1"),
        (
            "training: {unreached_weight: 0.5}\ndrafter: {kind: eagle}",
            "must be 0, 1 and 1 with a drafter without blocks",
        ),
        ("evaluate: {prompts: [{name: a, path: b}]}", "evaluate.tune_prompts: must be set"),
        (
            "evaluate: {prompts: [{name: a, path: b}], tune_prompts: {name: c, path: ./b}}",
            "evaluate.tune_prompts: must not be among evaluate.prompts, got ./b",
        ),
        (
            "evaluate: {prompts: [{name: a, path: b}], trees: ['chain:length=2']}\n"
            "calibrate: {prompts: {name: c, path: b}}",
            "calibrate.prompts: must not be among evaluate.prompts, got b; choose on others",
        ),
        (
            'evaluate: {prompts: [{name: a, path: b, limit: 0}], trees: ["chain:length=2"]}',
            "evaluate.prompts.limit: must be >= 1, got 0",
        ),
    ],
)
def test_mistakes_in_the_file(write, extra, expected):
    assert expected in error_of(write(MINIMAL + extra + "\n"))


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--training.lrr", "1"], "--training.lrr: unknown key training.lrr; did you mean training.lr?"),
        (["--training.lr.x", "1"], "training.lr: must be a number, got {'x': 1}"),
        (["--training.lr", "fast"], "training.lr: must be a number, got fast"),
        (["--corpus.sources", "null"], "corpus.sources: "),
    ],
)
def test_mistakes_in_overrides(write, words, expected):
    assert expected in error_of(write(MINIMAL), *words)


@pytest.mark.parametrize(
    "words, expected",
    [
        (["5"], "5: expected an override such as --training.lr 1e-3, got 5"),
        (["--training.lr"], "--training.lr: must be an option or have a value, got none"),
        (["--training.lr", "--seed", "3"], "--training.lr: must be an option or have a value, got --seed"),
        (["--a", "[1"], "cannot be read as a value; quote it"),
    ],
)
def test_words_that_are_no_overrides(words, expected):
    with pytest.raises(UserError, match="(?s)" + expected.replace("[", r"\[")):
        parse_overrides(words)


def test_unreadable_files(write, tmp_path):
    assert "no such recipe file" in error_of("nowhere.yaml")
    assert "must hold keys such as target, got just text" in error_of(write("just text"))
    assert "must hold keys such as target, got None" in error_of(write(""))
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    assert "cannot be read" in error_of("latin.yaml")
    missing = error_of(write("corpus: {sources: [{path: a}], max_length: 99}\n"))
    assert "missing target" in missing


def test_policies_are_known_before_they_are_imported(write):
    """By the names in the source."""
    for name in POLICIES:
        settings = ":length=1" if name == "chain" else ""
        found = ""
        try:
            load_recipe(write(MINIMAL), ["--evaluate.trees", f"[{name}{settings}]"])
        except UserError as error:
            found = str(error)
        assert "must be policies out of" not in found
    assert f"out of {', '.join([*POLICIES, *WITH_NGRAMS])}, got chan; did you mean chain?" in error_of(
        write(MINIMAL), "--evaluate.trees", "[chan]"
    )


def test_every_key_is_explained():
    keys = {key.name: key.text for key in describe_keys()}
    assert {
        "training.lr",
        "corpus.sources[].path",
        "regenerate.server.url",
        "evaluate.prompts[].limit",
    } <= keys.keys()
    assert [key for key, text in keys.items() if not text] == []
    assert "command" not in keys


@pytest.mark.parametrize(
    "dtype, expected",
    [
        ("auto", ("bfloat16", "bfloat16", "fastest")),
        ("bfloat16", ("bfloat16", "bfloat16", "same")),
        ("float32", ("float32", "float32", "same")),
    ],
)
def test_dtypes_that_follow_the_targets(write, dtype, expected):
    """As it is written: what a run has stored is no longer up to date where that changes."""
    path = write(MINIMAL)
    recipe = load_recipe(path, ["--target.dtype", dtype])
    found = recipe.hidden_states.dtype, recipe.export.dtype, recipe.evaluate.transformers_dtype
    assert found == expected
    own = ["--hidden_states.dtype", "float32", "--evaluate.transformers_dtype", "same"]
    recipe = load_recipe(path, ["--target.dtype", dtype, *own])
    assert (recipe.hidden_states.dtype, recipe.evaluate.transformers_dtype) == ("float32", "same")


def test_a_store_holds_what_the_drafter_reads(write):
    """Unless the drafter's shape is that of `init_from`."""
    text = "target: {model: here}\ncorpus: {sources: [{path: chats.json}], max_length: 256}\n"
    text += "hidden_states: {mode: offline, tapped_blocks: [2, -4]}\n"
    assert load_recipe(write(text)).hidden_states.tapped_blocks == [2, -4]
    words = ["--drafter.tapped_blocks", "[3]"]
    with pytest.raises(UserError, match=r"must include drafter.tapped_blocks \[3\], got \[2, -4\]"):
        load_recipe(write(text), words)
    load_recipe(write(text), [*words, "--training.init_from", "old"])
    load_recipe(write(text), [*words, "--drafter.kind", "eagle"])


@pytest.mark.parametrize("kind", ["edd", "medusa"])
@pytest.mark.parametrize("tree", ["pct:threshold=0.2,max_depth=3", "pct:draft_seconds=1,verify_seconds=2"])
def test_a_tree_with_all_written_out_takes_no_calibration(kind, tree, write):
    drafter = f"drafter: {{kind: {kind}{', heads: 10' if kind == 'medusa' else ''}}}\n"
    evaluate = f"evaluate: {{prompts: [{{name: a, path: b}}], trees: ['{tree}']}}\n"
    assert not load_recipe(write(MINIMAL + drafter + evaluate)).calibrate.is_asked


def test_a_drafter_to_start_from_is_of_the_kind_asked_for(write):
    """An error before any stage has run; what is not there yet is missed by the stage."""
    path = write(MINIMAL)
    words = ["--training.init_from", "old", "--drafter.kind", "eagle"]
    load_recipe(path, words)
    Path("old").mkdir()
    config = {"model_type": "drafttrain_edd", "format_version": 1, "target": {}}
    Path("old/config.json").write_text(json.dumps(config), encoding="utf-8")
    asked = "drafter.kind: must be edd without lora_rank, the kind of training.init_from, got eagle"
    assert re.search(asked, error_of(path, *words))
    load_recipe(path, words[:2])
    config["model_type"] = "llama"
    Path("old/config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "old: holds a llama model" in error_of(path, *words[:2])


def test_a_drafter_to_start_from_may_be_named_by_its_stage(write):
    Path("run/drafter/drafter").mkdir(parents=True)
    config = {"model_type": "drafttrain_edd", "format_version": 1, "target": {}}
    Path("run/drafter/drafter/config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("run/drafter", "run/drafter/drafter"):
        found = load_recipe(write(MINIMAL), ["--training.init_from", name]).training.init_from
        assert found == "run/drafter/drafter"
    assert load_recipe(write(MINIMAL), ["--training.init_from", "run//x"]).training.init_from == "run//x"


def test_a_drafter_to_start_from_has_the_shape_asked_for(write):
    """The old drafter decides what the section drafter leaves out."""
    path = write(MINIMAL)
    words = ["--training.init_from", "old"]
    Path("old").mkdir()
    config = {"model_type": "drafttrain_edd", "format_version": 1, "target": {}, "num_key_value_heads": 3}
    config["intermediate_size"] = 40
    for anchor in (None, False, True):  # None: of a version that did not know it
        there = {} if anchor is None else {"anchor": anchor}
        Path("old/config.json").write_text(json.dumps(config | there), encoding="utf-8")
        load_recipe(path, [*words, "--drafter.kv_heads", "3"])
        wrong = error_of(path, *words, "--drafter.kv_heads", "9")
        assert wrong.endswith("drafter.kv_heads: must be 3 as in training.init_from, got 9; leave it out")
        load_recipe(path, [*words, "--drafter.intermediate_size", "40"])
        wrong = error_of(path, *words, "--drafter.intermediate_size", "41")
        assert "drafter.intermediate_size: must be 40 as in training.init_from, got 41" in wrong
        load_recipe(path, [*words, "--drafter.anchor", "true"])  # which is added where there is none


def test_a_corpus_of_regenerated_text_alone_is_checked(write):
    text = "target: {model: smollm2-135m-instruct}\nregenerate: {sources: [{path: a.jsonl}]}\n"
    with pytest.raises(UserError, match="corpus.validation_fraction: must be .*, got 1.5"):
        load_recipe(write(text + "corpus: {validation_fraction: 1.5}\n"))
