"""`tokenizer` and `stop_strings` inside `generate`, and the function that a bundle brings with it."""

import copy
import importlib.metadata
import shutil
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    StoppingCriteriaList,
    StopStringCriteria,
    dynamic_module_utils,
)

import drafttrain
from drafttrain.export.remote import remote_files
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


def test_stop_strings_end_each_row_of_a_padded_batch(model, tokenizer, tiny_bundle, options):
    given = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert not given["attention_mask"].all()
    whole = model.generate(**given, do_sample=False, max_new_tokens=30)[:, given["input_ids"].shape[1] :]
    options["stop_strings"] += [tokenizer.decode(row[9 + 3 * i]) for i, row in enumerate(whole)]
    options["pad_token_id"] = tokenizer.pad_token_id
    expected = model.generate(**given, **options)
    assert torch.equal(model.generate(**given, **options, **drafted(tiny_bundle)), expected)
    assert len({int((row == tokenizer.pad_token_id).sum()) for row in expected}) > 1


def test_stop_strings_of_a_config_as_a_criterion(model, tokenizer, tiny_bundle, options):
    """The way that docs/python.md names for a function, which transformers gives no tokenizer."""
    given = tokenizer(PROMPTS[:1], return_tensors="pt")
    expected = model.generate(**given, **options)
    config = GenerationConfig(do_sample=False, max_new_tokens=30, stop_strings=options["stop_strings"])
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, config.stop_strings)])
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        model.generate(**given, generation_config=config, tokenizer=tokenizer, **drafted(tiny_bundle))
    config.stop_strings = None
    found = model.generate(
        **given, generation_config=config, stopping_criteria=criteria, **drafted(tiny_bundle)
    )
    assert torch.equal(found, expected)


def test_the_whole_of_generate_for_a_repository(model, tokenizer, tiny_bundle):
    given = tokenizer(PROMPTS[:1], return_tensors="pt")
    plain = model.generate(**given, do_sample=False, max_new_tokens=30)
    words = [tokenizer.decode(token) for token in plain[0, given["input_ids"].shape[1] + 2 : -2]]
    stop = next(word for word in words if word.isascii() and word.strip())
    options = {"do_sample": False, "max_new_tokens": 30, "stop_strings": [stop], "tokenizer": tokenizer}
    expected = model.generate(**given, **options)
    found = drafttrain.generate_of_repository(model, tiny_bundle, **given, **options, streamer=None)
    assert torch.equal(found, expected) and len(found[0]) < len(plain[0])
    config = GenerationConfig(do_sample=False, max_new_tokens=30, stop_strings=[stop])
    found = drafttrain.generate_of_repository(
        model, tiny_bundle, **given, generation_config=config, tokenizer=tokenizer
    )
    assert torch.equal(found, expected)
    own = copy.deepcopy(model)
    own.generation_config.stop_strings = [stop]
    config = GenerationConfig(do_sample=False, max_new_tokens=30)
    found = drafttrain.generate_of_repository(
        own, tiny_bundle, **given, generation_config=config, tokenizer=tokenizer
    )
    assert torch.equal(found, expected)
    whole = {"do_sample": False, "max_new_tokens": 30}
    found = drafttrain.generate_of_repository(own, tiny_bundle, **given, **whole, stop_strings=None)
    assert torch.equal(found, plain)  # those of the model are off
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, ["never said"])])
    found = drafttrain.generate_of_repository(
        own, tiny_bundle, **given, **whole, tokenizer=tokenizer, stopping_criteria=criteria
    )
    assert torch.equal(found, plain)  # a caller's own take their place
    for name, value in (("token", "x"), ("cache_dir", "here"), ("local_files_only", True)):
        with pytest.raises(UserError, match=f"{name}: must be left out with a drafter"):
            drafttrain.generate_of_repository(model, tiny_bundle, **given, **{name: value})
    with pytest.raises(UserError, match="token_healing: must be off"):
        drafttrain.generate_of_repository(model, tiny_bundle, **given, token_healing=True)
    with pytest.raises(UserError, match="nobody/nothing@v2: no such folder"):
        drafttrain.generate_of_repository(model, "nobody/nothing", **given, revision="v2")
    for place in (str(tiny_bundle), "nobody/nothing@v1"):
        with pytest.raises(UserError, match="revision: must be left out with a folder or name@revision"):
            drafttrain.generate_of_repository(model, place, **given, revision="v2")
    with pytest.raises(UserError, match="drafter: must be given"):
        drafttrain.generate_of_repository(model, None, **given)
    with pytest.raises(UserError, match="tokenizer: must be given with stop_strings"):
        drafttrain.generate_of_repository(model, tiny_bundle, **given, stop_strings=["x"])


def test_stop_strings_reach_the_function(model, tokenizer, tiny_bundle):
    given = tokenizer(PROMPTS[:1], return_tensors="pt")
    plain = model.generate(**given, do_sample=False, max_new_tokens=30)
    words = [tokenizer.decode(token) for token in plain[0, given["input_ids"].shape[1] + 2 : -2]]
    stop = next(word for word in words if word.isascii() and word.strip())
    options = {"do_sample": False, "max_new_tokens": 30, "stop_strings": stop, "tokenizer": tokenizer}
    expected = model.generate(**given, **options)
    found = model.generate(**given, **options, **drafted(tiny_bundle))
    assert torch.equal(found, expected) and len(found[0]) < len(plain[0])


@pytest.fixture
def folder(tiny_bundle, tmp_path, monkeypatch):
    """A bundle that brings the function, whose code transformers copies to a folder of this test."""
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, folder)
    for name, content in remote_files(None).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return str(folder)


def test_a_bundle_brings_the_function(model, tokenizer, folder, options):
    """Plain, and with stop strings as an argument, of the call's config and of the model's."""
    given = tokenizer(PROMPTS[:1], return_tensors="pt")
    route = {"custom_generate": folder, "drafter": folder, "trust_remote_code": True, "tree": TREE}
    whole = {"do_sample": False, "max_new_tokens": 30}
    plain, ended = model.generate(**given, **whole), model.generate(**given, **options)
    assert torch.equal(model.generate(**given, **whole, **route), plain)
    assert torch.equal(model.generate(**given, **options, **route), ended) and len(ended[0]) < len(plain[0])
    config = GenerationConfig(**whole, stop_strings=options["stop_strings"])
    found = model.generate(**given, generation_config=config, tokenizer=tokenizer, **route)
    assert torch.equal(found, ended)
    own = copy.deepcopy(model)
    own.generation_config.stop_strings = options["stop_strings"]
    assert torch.equal(own.generate(**given, **whole, tokenizer=tokenizer, **route), ended)


def test_without_the_package_a_bundle_names_its_source(model, tokenizer, folder, monkeypatch):
    version = importlib.metadata.version

    def missing(name):
        if name == "drafttrain":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setitem(sys.modules, "drafttrain", None)
    given = tokenizer(PROMPTS[:1], return_tensors="pt")
    with pytest.raises(
        ImportError, match="drafttrain: must be installed .*; install it from a clone"
    ) as found:
        model.generate(**given, custom_generate=folder, drafter=folder, trust_remote_code=True)
    assert "\n" not in str(found.value)
