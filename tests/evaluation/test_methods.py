"""Which methods a benchmark compares, as the command line names them, and what each decodes with."""

import pytest
from transformers import AutoModelForCausalLM

from drafttrain.evaluation import methods as module
from drafttrain.evaluation.benchmark_config import MethodSpec
from drafttrain.evaluation.methods import Methods
from drafttrain.evaluation.stock import Stock, load_stock
from drafttrain.inference.params import SamplingParams
from drafttrain.utils.errors import UserError

IDS = [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def stock(tiny_target) -> Stock:
    return load_stock(tiny_target, False, IDS)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("edd=folder", MethodSpec("edd", "folder")),
        ("edd timed=org/name@timed", MethodSpec("edd timed", "org/name", "timed")),
        (" a = b @ c ", MethodSpec("a", "b", "c")),
        ("x=f@eagle2:top_k=2,total=4", MethodSpec("x", "f", "eagle2:top_k=2,total=4")),
        ("prompt_lookup", MethodSpec("prompt_lookup")),
        ("assistant=folder", MethodSpec("assistant", "folder")),
    ],
)
def test_spelling(text, expected):
    assert MethodSpec.parse(text) == expected


def test_folders_may_have_an_at_in_their_name(tmp_path):
    (tmp_path / "a@b").mkdir()
    assert MethodSpec.parse(f"x={tmp_path}/a@b") == MethodSpec("x", f"{tmp_path}/a@b")


@pytest.mark.parametrize(
    "text, message",
    [
        ("lookup", r"must be \[NAME=\]BUNDLE\[@TREE\], "),
        ("=folder", r"must be \[NAME=\]BUNDLE\[@TREE\], "),
        ("x=", r"must be \[NAME=\]BUNDLE\[@TREE\], "),
        ("x=folder@", r"must be \[NAME=\]BUNDLE\[@TREE\], .*, got x=folder@"),
        ("autoregressive=x", "is always measured"),
        ("lookahead=x", "takes no files"),
        ("assistant=x@chain:length=3", "leave out @chain:length=3"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(UserError, match=message):
        MethodSpec.parse(text)


def test_methods_of_one_bundle_share_its_weights(tiny_target, stock, tiny_bundle, monkeypatch):
    loads, load = [], module.load_bundle
    monkeypatch.setattr(module, "load_bundle", lambda *args: loads.append(args) or load(*args))
    trees = {"a": "chain:length=2", "b": "chain:length=4", "c": "ngram"}
    specs = [MethodSpec(name, str(tiny_bundle), tree) for name, tree in trees.items()]
    methods = Methods(tiny_target, [*specs, MethodSpec("d", str(tiny_bundle))], stock)
    assert len(loads) == 1 and loads[0][1] is tiny_target
    assert methods.described["a"]["tree"] == "chain:length=2" and methods.described["d"]["tree"]
    assert methods.identity["a"] != methods.identity["b"]
    run = methods.at(SamplingParams())
    found = {name: method(IDS, 8) for name, method in run.items()}
    assert len({tuple(one.token_ids) for one in found.values()}) == 1
    assert found["a"].stats.verify_tokens < found["b"].stats.verify_tokens


def test_the_target_is_tapped_as_each_method_needs(tiny_target, stock, tiny_bundle):
    methods = Methods(tiny_target, [MethodSpec("a", str(tiny_bundle)), MethodSpec("lookahead")], stock)
    run = methods.at(SamplingParams())
    for name, taps in (("a", [2]), ("lookahead", []), ("a", [2]), ("autoregressive", [])):
        run[name](IDS, 3)
        assert tiny_target.tapped_blocks == taps


def test_a_small_lm_drafts_unchanged(tiny_target, stock, tiny_target_folder):
    tree = "chain:length=3"
    methods = Methods(tiny_target, [MethodSpec("small", str(tiny_target_folder), tree)], stock)
    found = {name: method(IDS, 12) for name, method in methods.at(SamplingParams()).items()}
    assert found["small"].token_ids == found["autoregressive"].token_ids
    assert found["small"].stats.accept_len > 2  # it is the target's own model
    assert methods.described["small"]["tree"] == tree and methods.identity["small"]


def test_methods_without_files_and_an_assistant_are_exact(tiny_target, stock, tiny_target_folder):
    names = ["prompt_lookup", "lookahead", "self_draft", f"assistant={tiny_target_folder}"]
    methods = Methods(tiny_target, [MethodSpec.parse(name) for name in names], stock)
    found = {name: method(IDS, 12) for name, method in methods.at(SamplingParams()).items()}
    plain = found["autoregressive"].token_ids
    assert list(found)[2:] == ["prompt_lookup", "lookahead", "self_draft", "assistant"]
    assert all(one.token_ids == plain for one in found.values())
    assert methods.described["lookahead"]["window"] > 1 and methods.described["self_draft"]["budget"] > 0

    sampled = {name: method(IDS, 12) for name, method in methods.at(SamplingParams(1.0, seed=3)).items()}
    text = sampled["autoregressive"].token_ids
    assert text != plain
    assert all(one.token_ids == text for one in sampled.values() if one.stats is not None)
    other = methods.at(SamplingParams(1.0, seed=4))["autoregressive"](IDS, 12)
    assert other.token_ids != text
    again = methods.at(SamplingParams(1.0, seed=3))["transformers"](IDS, 12)
    assert again.token_ids == sampled["transformers"].token_ids


def test_unusable_methods_are_named(tiny_target, stock, tiny_bundle, tiny_target_folder, tmp_path):
    for spec, message in (
        (MethodSpec("a", str(tiny_bundle), "chain:lenth=2"), "method a: tree .* did you mean length"),
        (MethodSpec("a", str(tmp_path)), "no config.json there"),
        (MethodSpec("assistant", "/no/such/model"), "no such folder"),
    ):
        with pytest.raises(UserError, match=message) as error:
            Methods(tiny_target, [spec], stock)
        assert "\n" not in str(error.value)


def test_an_assistant_with_another_tokenizer_is_refused(tiny_target, stock, tiny_target_folder, monkeypatch):
    hashes = iter("ab")
    monkeypatch.setattr(module, "tokenizer_hash", lambda tokenizer: next(hashes))
    with pytest.raises(UserError, match="has another tokenizer"):
        Methods(tiny_target, [MethodSpec("assistant", str(tiny_target_folder))], stock)


def test_an_assistant_with_other_rows_of_embeddings_is_refused(
    tiny_target, stock, tiny_target_folder, tmp_path
):
    """transformers takes it for one with another tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
    model.resize_token_embeddings(576)
    model.save_pretrained(tmp_path)
    tiny_target.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match="must have 512 rows of embeddings as .*, got 576; transformers cannot"
    ):
        Methods(tiny_target, [MethodSpec("assistant", str(tmp_path))], stock)
