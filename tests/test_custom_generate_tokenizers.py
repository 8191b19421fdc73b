"""`tokenizer` and `stop_strings` inside `generate`, and the function that a bundle brings with it."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import drafttrain
from drafttrain.utils.errors import UserError

PROMPTS = ["The cat sat", "One day the small dog", "A", "It was late and"]
TREE = "chain:length=3"


@pytest.fixture(scope="module")
def model(tiny_target_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_target_folder):
    return AutoTokenizer.from_pretrained(tiny_target_folder, padding_side="left")


@pytest.fixture
def options(model, tokenizer):
    """Greedy options with a stop string that ends the text of the first prompt early."""
    given = tokenizer(PROMPTS[:1], return_tensors="pt")
    plain = model.generate(**given, do_sample=False, max_new_tokens=30)
    words = [tokenizer.decode(token) for token in plain[0, given["input_ids"].shape[1] + 2 : -2]]
    stop = next(word for word in words if word.isascii() and word.strip())
    return {"do_sample": False, "max_new_tokens": 30, "stop_strings": [stop], "tokenizer": tokenizer}


def drafted(bundle):
    return {"custom_generate": drafttrain.generate, "drafter": bundle, "tree": TREE}


def test_stop_strings_are_found_with_the_callers_tokenizer(model, tokenizer, tiny_bundle, options):
    """Not with the one in the model's folder: in this one the texts belong to other tokens."""
    given = tokenizer(PROMPTS[:1], return_tensors="pt")
    own = model.generate(**given, **options, **drafted(tiny_bundle))
    other = copy.deepcopy(tokenizer)
    other.get_vocab = lambda: {text: n ^ 1 for text, n in tokenizer.get_vocab().items()}
    options["tokenizer"] = other
    expected = model.generate(**given, **options)
    assert torch.equal(model.generate(**given, **options, **drafted(tiny_bundle)), expected)
    assert not torch.equal(own, expected)
    with pytest.raises(UserError, match="^tokenizer: must be one of transformers, got 'nonsense'"):
        model.generate(**given, **options | {"tokenizer": "nonsense"}, **drafted(tiny_bundle))


def test_a_tokenizer_in_the_kwargs_of_the_caller_is_not_taken(model, tokenizer, tiny_bundle, options):
    def call(**kwargs):
        del options["tokenizer"]
        return model.generate(**given, **options, **drafted(tiny_bundle))

    given = tokenizer(PROMPTS[:1], return_tensors="pt")
    expected = model.generate(**given, **options)
    assert torch.equal(call(tokenizer="nonsense"), expected)


@pytest.mark.parametrize("native", [True, False])
def test_the_callers_tokenizer_replaces_a_missing_one(
    native, model, tokenizer, tiny_bundle, options, tmp_path
):
    """Of a model whose folder has none, or that comes from no folder; later calls find it again."""
    given = tokenizer(PROMPTS[:1], return_tensors="pt")
    expected = model.generate(**given, **options)
    model.save_pretrained(tmp_path)
    bare, built = AutoModelForCausalLM.from_pretrained(tmp_path), copy.deepcopy(model)
    built.config._name_or_path = built.name_or_path = ""
    route = drafted(tiny_bundle) | {"native": native}
    for own, problem in ((bare, "cannot load its tokenizer"), (built, "the model has no name_or_path")):
        without = options | {"tokenizer": None}
        for fewer in (without, without | {"stop_strings": None}):
            with pytest.raises(UserError, match=f"tokenizer: must be given, .*{problem}.*; add") as found:
                own.generate(**given, **fewer, **route)
            assert "\n" not in str(found.value)
        with pytest.raises(UserError, match="tokenizer: must be one of transformers"):
            own.generate(**given, **options | {"tokenizer": 7, "stop_strings": None}, **route)
        found = drafttrain.generate_of_repository(own, tiny_bundle, **given, **options, native=native)
        assert torch.equal(found, expected)
        assert torch.equal(own.generate(**given, **options, **route), expected)
        assert torch.equal(own.generate(**given, **without, **route), expected)
