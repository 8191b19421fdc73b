"""`model.generate(custom_generate=drafttrain.generate)` gives what `generate` gives."""

import copy
import os
import shutil
import threading
import time

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    WatermarkingConfig,
)
from transformers.generation import BaseStreamer

import drafttrain
from drafttrain import custom_generate
from drafttrain.custom_generate import LOADED
from drafttrain.inference.given import file_times
from drafttrain.kernels.linear import is_available
from drafttrain.trees.chain import ChainPolicy
from drafttrain.utils.errors import UserError

TREES = ["chain:length=3", "eagle2:top_k=3,max_depth=3,total=8"]
PROMPTS = ["The cat sat", "One day the small dog", "A", "It was late and"]


@pytest.fixture(scope="module")
def model(tiny_target_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_target_folder):
    return AutoTokenizer.from_pretrained(tiny_target_folder, padding_side="left")


def inputs(tokenizer, n=1):
    return tokenizer(PROMPTS[:n], return_tensors="pt", padding=True)


def both(model, given, bundle, tree=TREES[1], native=True, **options):
    """The output of `generate`, and that with drafts, from the same state of torch's generator."""
    outputs = []
    ours = {"custom_generate": drafttrain.generate, "drafter": bundle, "tree": tree, "native": native}
    for drafted in ({}, ours):
        torch.manual_seed(3)
        outputs.append(model.generate(**given, **options, **drafted))
    return outputs


class NoRepeats(LogitsProcessor):
    """Depends on the whole text of its row."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -5:], -torch.inf)


class AtLength(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] % 11 == 0)


class ByRow(LogitsProcessor):
    """Keeps a number for each of two rows."""

    def __call__(self, input_ids, scores):
        return scores + torch.zeros(2, 1)


class EndsByRow(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(2, dtype=torch.bool)


class AnyEnds(StoppingCriteria):
    """One answer for all rows."""

    def __call__(self, input_ids, scores, **kwargs):
        return bool(input_ids[0, -1] % 3 == 0)


class BanOfRow(LogitsProcessor):
    """Keeps something else for each row."""

    def __call__(self, input_ids, scores):
        for row in range(len(scores)):
            scores[row, 5 * row : 200 * (row + 1)] = -torch.inf
        return scores


class Countdown(StoppingCriteria):
    def __init__(self, left):
        self.left = left

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        return torch.full((len(input_ids),), self.left <= 0)


class Seen(LogitsProcessor):
    """Counts its calls in a list, beside what cannot be copied."""

    def __init__(self):
        self.calls, self.lock = [0], threading.Lock()

    def __call__(self, input_ids, scores):
        self.calls[0] += 1
        return scores.scatter(1, input_ids[:, -1:] * 0 + 100 + self.calls[0], torch.inf)


OPTIONS = {
    "greedy": {},
    "limit of the whole": {"max_length": 20},
    "eos": {"eos_token_id": [5, 90, 120, 200, 300]},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": [5, 90, 120, 200, 300]},
    "bad words": {"bad_words_ids": [[5], [90, 120]], "suppress_tokens": [7, 8]},
    "forced end": {"forced_eos_token_id": 2},
    "own processor": {"logits_processor": LogitsProcessorList([NoRepeats()])},
    "allowed tokens": {
        "prefix_allowed_tokens_fn": lambda row, ids: [(7 * row + len(ids)) % 300 + 3, 9 + row]
    },
    "own criterion": {"stopping_criteria": StoppingCriteriaList([AtLength()])},
    "own limit": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(60)])},
    "no n-grams of the prompt": {"encoder_no_repeat_ngram_size": 2},
    "one token": {"max_new_tokens": 1},
    "sequence_bias": {"sequence_bias": {(5,): 9.0, (90,): 5.0, (5, 120): 20.0, (120, 7): 20.0}},
    "min_length": {"min_length": 22, "eos_token_id": [5, 90, 120, 200, 300]},
    "decay": {
        "exponential_decay_length_penalty": (3, 1.6),
        "eos_token_id": [5, 90, 120, 200, 300],
    },
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 300))},
    "forced_bos_token_id": {"forced_bos_token_id": 17, "begin_suppress_tokens": list(range(3, 300))},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "watermark of the token itself": {
        "watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2)
    },
}


@pytest.mark.parametrize("n", [1, 4])
def test_what_a_callers_own_keep_is_kept_for_each_row(n, model, tokenizer, tiny_bundle):
    """A criterion that ends all rows after some tokens, a processor that counts."""
    given = inputs(tokenizer, n)
    found, seen = [], []
    for drafted in ({}, call(tiny_bundle)):
        seen.append(Seen())
        own = {
            "stopping_criteria": StoppingCriteriaList([Countdown(7)]),
            "logits_processor": LogitsProcessorList(seen[-1:]),
        }
        found.append(model.generate(**given, **{**drafted, "do_sample": False, "max_new_tokens": 24, **own}))
    assert torch.equal(*found) and found[0].shape[1] == given["input_ids"].shape[1] + 7
    assert [one.calls for one in seen] == [[7], [7] if n == 1 else [0]]  # rows have copies


class Noise(LogitsProcessor):
    """Draws, each row for itself."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand_like(scores)


class Spoilt(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.tensor([9]), torch.inf)


class Guided(LogitsProcessor):
    """Holds a model in a list; `deepcopy` would copy its weights for each row."""

    def __init__(self, model):
        self.models, self.calls = [model], []

    def __call__(self, input_ids, scores):
        self.calls.append(len(input_ids))
        return scores + self.models[0](input_ids).logits[:, -1]


def test_processors_that_draw_or_hold_a_model_work_with_several_rows(
    tiny_target_folder, tokenizer, tiny_bundle
):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    given = inputs(tokenizer, 3)
    found = model.generate(**given, **call(tiny_bundle, logits_processor=LogitsProcessorList([Noise()])))
    assert found.shape[0] == 3
    guide = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    copies, texts = [], []
    guide.__deepcopy__ = lambda memo: copies.append(1) or guide
    for drafted in ({}, call(tiny_bundle)):
        own = {"logits_processor": LogitsProcessorList([Guided(guide)])}
        texts.append(model.generate(**given, **{**drafted, "do_sample": False, "max_new_tokens": 8, **own}))
    assert torch.equal(*texts) and not copies


def test_loading_the_drafter_is_not_in_max_time(tiny_target_folder, tokenizer, tiny_bundle, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    loading, clock, waited = custom_generate._load, time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: clock() + waited[0])

    def slow(*args):
        waited[0] += 1000.0
        return loading(*args)

    monkeypatch.setattr(custom_generate, "_load", slow)
    plain = model.generate(**inputs(tokenizer), do_sample=False, max_new_tokens=12)
    assert torch.equal(model.generate(**inputs(tokenizer), **call(tiny_bundle, max_time=100.0)), plain)


def test_samples_are_drawn_where_an_unused_logit_is_not_finite(tiny_target_folder, tokenizer, tiny_bundle):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.get_input_embeddings().weight)
        model.lm_head.bias.zero_()
        model.generate(**inputs(tokenizer), **call(tiny_bundle, native=False))  # which checks the model
        model.lm_head.bias[7] = torch.inf
    options = {"do_sample": True, "max_new_tokens": 12, "suppress_tokens": [7], "top_k": 40}
    texts = []
    for seed in (0, 1):
        pair = []
        for drafted in ({}, call(tiny_bundle, native=False)):
            torch.manual_seed(seed)
            pair.append(model.generate(**inputs(tokenizer), **drafted | options))
        assert torch.equal(*pair)
        texts.append(pair[0].tolist())
    assert texts[0] != texts[1]


def test_a_processor_that_spoils_scores_fails_as_in_generate(model, tokenizer, tiny_bundle):
    options = {"do_sample": True, "max_new_tokens": 4, "logits_processor": LogitsProcessorList([Spoilt()])}
    for drafted in ({}, call(tiny_bundle)):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            model.generate(**inputs(tokenizer), **drafted | options)


def test_ids_of_32_bits_give_ids_of_64(model, tokenizer, tiny_bundle):
    given = inputs(tokenizer, 2)
    expected = model.generate(**given, do_sample=False, max_new_tokens=12)
    found = model.generate(**given | {"input_ids": given["input_ids"].int()}, **call(tiny_bundle))
    assert found.dtype == torch.long and torch.equal(found, expected)


@pytest.mark.parametrize("tree, native", [(TREES[0], True), (TREES[1], True), (TREES[1], False)])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_output_is_that_of_generate(name, n, tree, native, model, tokenizer, tiny_bundle):
    options = {"max_new_tokens": 24, "do_sample": False, **OPTIONS[name]}
    if "max_length" in options:
        del options["max_new_tokens"]
    plain, drafted = both(model, inputs(tokenizer, n), tiny_bundle, tree, native, **options)
    assert torch.equal(plain, drafted)


def test_a_prompt_of_one_token_is_followed_by_a_forced_one(model, tiny_bundle):
    given = {"input_ids": torch.tensor([[40], [41]])}
    options = {"do_sample": False, "max_new_tokens": 12, "forced_bos_token_id": 17}
    plain, drafted = both(model, given, tiny_bundle, **options)
    assert torch.equal(plain, drafted) and drafted[:, 1].tolist() == [17, 17]


@pytest.mark.usefixtures("hasty_calibration")
def test_a_tree_of_this_machines_costs(model, tokenizer, tiny_bundle):
    for n in (1, 4):
        plain, drafted = both(
            model, inputs(tokenizer, n), tiny_bundle, "timed", do_sample=False, max_new_tokens=24
        )
        assert torch.equal(plain, drafted)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_k": 20, "top_p": 0.9}, {"min_p": 0.05}])
def test_a_sampled_row_is_that_of_generate(options, native, model, tokenizer, tiny_bundle):
    options = {"max_new_tokens": 24, "do_sample": True, "repetition_penalty": 1.2, **options}
    plain, drafted = both(model, inputs(tokenizer), tiny_bundle, native=native, **options)
    assert torch.equal(plain, drafted)


def test_sampled_rows_have_the_distribution_of_generate(model, tokenizer, tiny_bundle):
    """20,480 samples of two tokens, in batches, against the exact probabilities."""
    given = inputs(tokenizer)
    length, n = given["input_ids"].shape[1], 1024
    options = {"max_new_tokens": 2, "do_sample": True, "top_k": 4, "eos_token_id": -1}
    counts: dict[tuple, int] = {}
    torch.manual_seed(0)
    for _ in range(20):
        found = model.generate(
            **given,
            **options,
            num_return_sequences=n,
            custom_generate=drafttrain.generate,
            drafter=tiny_bundle,
            tree=TREES[0],
        )
        for row in found[:, length:].tolist():
            counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    total, distance = sum(counts.values()), 0.0

    def kept(ids):
        logits = model(ids).logits[0, -1]
        best = logits.topk(4)
        return zip(best.indices.tolist(), best.values.softmax(-1).tolist())

    with torch.no_grad():
        for first, p in kept(given["input_ids"]):
            longer = torch.cat([given["input_ids"], torch.tensor([[first]])], 1)
            for second, q in kept(longer):
                distance += abs(counts.pop((first, second), 0) / total - p * q)
    assert not counts and total == 20 * n and distance / 2 < 0.02


@pytest.mark.parametrize("sample", [False, True])
def test_scores_and_logits(sample, model, tokenizer, tiny_bundle):
    options = {"max_new_tokens": 12, "do_sample": sample, "output_scores": True, "output_logits": True}
    options |= {"repetition_penalty": 1.3, "return_dict_in_generate": True}
    plain, drafted = both(model, inputs(tokenizer), tiny_bundle, **options)
    assert torch.equal(plain.sequences, drafted.sequences)
    for name in ("scores", "logits"):
        mine, theirs = torch.cat(drafted[name]), torch.cat(plain[name])
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_a_streamer_gets_each_token(model, tokenizer, tiny_bundle):
    class Pieces(BaseStreamer):
        def __init__(self):
            self.put_, self.ended = [], False

        def put(self, value):
            self.put_.append(value.tolist())

        def end(self):
            self.ended = True

    streamers = Pieces(), Pieces()
    given = inputs(tokenizer)
    for streamer, drafted in zip(streamers, ({}, {"custom_generate": drafttrain.generate})):
        more = {"drafter": tiny_bundle, "tree": TREES[0]} if drafted else {}
        model.generate(**given, do_sample=False, max_new_tokens=9, streamer=streamer, **drafted, **more)
    assert streamers[0].put_ == streamers[1].put_ and streamers[1].ended
    text = TextIteratorStreamer(tokenizer)
    drafted = {"custom_generate": drafttrain.generate, "drafter": tiny_bundle, "tree": TREES[0]}
    model.generate(**given, do_sample=False, max_new_tokens=9, streamer=text, **drafted)
    assert "".join(text)


def test_n_grams_draft_without_a_drafter(model, tokenizer):
    given = inputs(tokenizer)
    plain = model.generate(**given, do_sample=False, max_new_tokens=20)
    drafted = model.generate(**given, do_sample=False, max_new_tokens=20, custom_generate=drafttrain.generate)
    assert torch.equal(plain, drafted)


def test_the_model_stays_unchanged(tiny_target_folder, tokenizer, tiny_bundle):
    """Trainable where it was, in training mode, and loaded once."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32).train()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    expected = model.eval()(**inputs(tokenizer)).logits
    model.train()
    for _ in range(2):
        model.generate(
            **inputs(tokenizer),
            max_new_tokens=3,
            custom_generate=drafttrain.generate,
            drafter=tiny_bundle,
            tree=TREES[0],
        )
        assert model.training and all(weight.requires_grad for weight in model.parameters())
    assert len(getattr(model, LOADED).decoders) == 1
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert torch.equal(model.eval()(**inputs(tokenizer)).logits, expected)


def call(bundle, **options):
    """Options of a greedy call with drafts."""
    drafted = {"custom_generate": drafttrain.generate, "drafter": bundle, "tree": TREES[0]}
    return {"do_sample": False, "max_new_tokens": 12, **drafted, **options}


def test_several_rows_of_a_prompt_have_its_processors(model, tokenizer, tiny_bundle):
    def allowed(prompt, ids):
        return [(7 * prompt + len(ids)) % 300 + 3, 9 + prompt]

    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": 12}
    for more in ({"encoder_repetition_penalty": 1.5}, {"prefix_allowed_tokens_fn": allowed}):
        plain, drafted = both(model, inputs(tokenizer, 2), tiny_bundle, **options, **more)
        assert torch.equal(plain, drafted)


@pytest.mark.parametrize("sample", [False, True])
def test_nothing_is_chosen_beyond_the_end(sample, model, tokenizer, tiny_bundle):
    """A grammar allows nothing after the end; and the generator is left as plain decoding leaves it."""
    given, ends = inputs(tokenizer), [5, 90, 120, 200, 300]
    length = given["input_ids"].shape[1]

    def allowed(prompt, ids):
        return [] if any(token in ends for token in ids[length:].tolist()) else list(range(300))

    options = {"max_new_tokens": 40, "do_sample": sample, "eos_token_id": ends, "pad_token_id": 0}
    for seed in range(4):
        after = []
        for drafted in ({}, call(tiny_bundle, tree=TREES[1])):
            torch.manual_seed(seed)
            found = model.generate(**given, **drafted | options, prefix_allowed_tokens_fn=allowed)
            after.append((found.tolist(), torch.rand(1).item()))
        assert after[0] == after[1]


def test_scores_are_kept_where_they_are_asked_for(model, tokenizer, tiny_bundle):
    class Scores(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append(None if scores is None else len(scores))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    for asked in ({}, {"output_scores": True, "return_dict_in_generate": True}):
        seen_by = []
        for drafted in ({}, call(tiny_bundle)):
            seen = []
            options = {"max_new_tokens": 6, "stopping_criteria": StoppingCriteriaList([Scores()])}
            model.generate(**inputs(tokenizer), **drafted | options, repetition_penalty=1.2, **asked)
            seen_by.append(seen)
        assert seen_by[0] == seen_by[1] == ([None] * 6 if not asked else list(range(1, 7)))


def test_a_model_can_be_copied_and_trained_afterwards(tiny_target_folder, tokenizer, tiny_bundle):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32).train()
    model.model.layers[0].eval()
    attention, given = model.config._attn_implementation, inputs(tokenizer)
    expected = model.generate(**given, **call(tiny_bundle))
    modes = [module.training for module in model.model.layers]
    assert modes == [False] + [True] * (len(modes) - 1)
    assert model.config._attn_implementation == attention
    assert not any(layer._forward_hooks for layer in model.model.layers)
    again = copy.deepcopy(model)
    assert not getattr(again, LOADED).decoders
    assert torch.equal(again.generate(**given, **call(tiny_bundle)), expected)
    again(**given, labels=given["input_ids"]).loss.backward()


def runs_natively(model):
    """Return whether the decoder of the last call does."""
    return list(getattr(model, LOADED).decoders.values())[-1][1].target.native is not None


@pytest.mark.skipif(not is_available(), reason="no C++ compiler here")
def test_a_native_copy_decodes_until_the_model_changes(tiny_target_folder, tokenizer, tiny_bundle):
    """Also where the change leaves no mark on the tensor; several trees share the copy."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    given = inputs(tokenizer, 2)
    for tree in TREES:
        model.generate(**given, **call(tiny_bundle, tree=tree))
        assert runs_natively(model)
    decoders = [decoder for _, decoder in getattr(model, LOADED).decoders.values()]
    assert decoders[0].target.native is decoders[1].target.native
    model.generate(**given, **call(tiny_bundle, native=False))
    assert not runs_natively(model)
    before = model.generate(**given, **call(tiny_bundle))
    model.lm_head.weight.data.neg_()
    plain = model.generate(**given, do_sample=False, max_new_tokens=12)
    for _ in range(2):
        assert torch.equal(model.generate(**given, **call(tiny_bundle)), plain)
        assert not runs_natively(model) and getattr(model, LOADED).copied is None
    assert not torch.equal(plain, before)


def test_drafters_of_one_model_read_their_own_blocks(tiny_target_folder, tokenizer, tiny_bundle, tmp_path):
    """Also after another one has been loaded for the same copy."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    given, small = inputs(tokenizer), str(tiny_target_folder)
    plain = model.generate(**given, do_sample=False, max_new_tokens=12)
    for native in (True, False):
        for drafter in (tiny_bundle, small, tiny_bundle):
            assert torch.equal(model.generate(**given, **call(drafter, native=native)), plain)
        decoders = {
            key[1]: one for key, (_, one) in getattr(model, LOADED).decoders.items() if key[0] != native
        }
        decoders[small].target.tap([0, 1])
        assert (
            decoders[tiny_bundle].target.tapped_blocks
            == decoders[tiny_bundle].proposer.drafter.config.tapped_blocks
        )


def test_a_drafter_that_is_exported_again_is_loaded_again(
    tiny_target_folder, tokenizer, tiny_bundle, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle")

    def decoder():
        model.generate(**inputs(tokenizer), **call(str(folder)))
        [(_, found)] = getattr(model, LOADED).decoders.values()
        return found

    first = decoder()
    assert decoder() is first
    os.utime(folder / "model.safetensors", (1, 1))
    assert decoder() is not first


def test_a_file_that_changes_is_noticed(tmp_path):
    file, folder = tmp_path / "calibration.json", tmp_path / "folder"
    folder.mkdir()
    for path in (file, folder / "a"):
        path.write_text("{}")
    before = file_times([file, folder, tmp_path / "absent"])
    assert [name for name, _ in before] == ["calibration.json", "a"]
    os.utime(file, (1, 1))
    assert file_times([file, folder, tmp_path / "absent"]) != before


def test_a_wrong_tokenizer_does_not_stay(tiny_target_folder, tokenizer, tiny_bundle):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    model.name_or_path = ""  # as of a model that is made in a program
    wrong = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"x": 0}, unk_token="x")))
    with pytest.raises(UserError, match="its tokenizer must read"):
        model.generate(**inputs(tokenizer), tokenizer=wrong, **call(tiny_bundle))
    plain = model.generate(**inputs(tokenizer), do_sample=False, max_new_tokens=12)
    drafted = model.generate(**inputs(tokenizer), tokenizer=tokenizer, **call(tiny_bundle))
    assert torch.equal(drafted, plain)


@pytest.mark.parametrize("name", ["drafter", "ngrams", "calibration"])
def test_places_are_paths(name, model, tokenizer, tiny_bundle):
    options = call(tiny_bundle) | {name: ["a"]}
    with pytest.raises(UserError, match=f"{name}: must be a folder or Hub id, got "):
        model.generate(**inputs(tokenizer), **options)


@pytest.mark.skipif(not is_available(), reason="no C++ compiler here")
def test_hooks_run_the_models_own_modules(tiny_target_folder, tokenizer, tiny_bundle):
    """And the copy again when they are gone."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    given = inputs(tokenizer)
    before = model.generate(**given, **call(tiny_bundle))
    hook = model.model.norm.register_forward_hook(lambda module, args, output: -output)
    plain = model.generate(**given, do_sample=False, max_new_tokens=12)
    assert torch.equal(model.generate(**given, **call(tiny_bundle)), plain) and not torch.equal(plain, before)
    hook.remove()
    assert torch.equal(model.generate(**given, **call(tiny_bundle)), before)
    assert getattr(model, LOADED).copied is not None


def test_a_hook_on_the_model_itself_is_not_passed_over(tiny_target_folder, tokenizer, tiny_bundle):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    before = model.generate(**inputs(tokenizer), **call(tiny_bundle, native=False))
    hook = model.register_forward_hook(lambda module, args, out: setattr(out, "logits", -out.logits))
    with pytest.raises(UserError, match="verifies trees wrongly"):  # decoding would not call it
        model.generate(**inputs(tokenizer), **call(tiny_bundle, native=False))
    hook.remove()
    assert torch.equal(model.generate(**inputs(tokenizer), **call(tiny_bundle, native=False)), before)


def test_few_decoders_are_kept(tiny_target_folder, tokenizer, tiny_bundle):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    trees = [f"chain:length={n}" for n in range(1, custom_generate.KEPT + 2)]
    for tree in (*trees, trees[1]):
        model.generate(**inputs(tokenizer), **call(tiny_bundle, tree=tree))
    assert [key[2] for key in getattr(model, LOADED).decoders] == [repr(t) for t in (*trees[2:], trees[1])]


def test_autocast_is_refused(model, tokenizer, tiny_bundle):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match="autocast: must be off"):
        model.generate(**inputs(tokenizer), **call(tiny_bundle))


def test_a_model_over_several_devices_is_refused(model, tokenizer, tiny_bundle, monkeypatch):
    monkeypatch.setattr(model, "hf_device_map", {"model": 0, "lm_head": 1}, raising=False)
    with pytest.raises(UserError, match="model: must be whole on one device, got one that .*device_map"):
        model.generate(**inputs(tokenizer), **call(tiny_bundle))
    monkeypatch.setattr(model, "hf_device_map", {"": "cpu"})
    assert model.generate(**inputs(tokenizer), **call(tiny_bundle)) is not None


def test_an_output_longer_than_the_room_at_first(model, tokenizer, tiny_bundle, monkeypatch):
    monkeypatch.setattr(custom_generate, "ROOM", 2)
    monkeypatch.setattr("drafttrain.inference.session.DRAFT_SLOTS", 1)
    given = inputs(tokenizer, 3)
    plain = model.generate(**given, do_sample=False, max_new_tokens=40)
    assert torch.equal(model.generate(**given, **call(tiny_bundle, max_new_tokens=40)), plain)


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_count(merged, tiny_target_folder, tokenizer, tiny_bundle):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    given = inputs(tokenizer)
    model.generate(**given, **call(tiny_bundle))
    torch.manual_seed(0)
    settings = LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False, lora_alpha=64)
    tuned = get_peft_model(model, settings).eval()
    tuned = tuned.merge_and_unload() if merged else tuned
    plain = tuned.generate(**given, do_sample=False, max_new_tokens=12)
    assert torch.equal(tuned.generate(**given, **call(tiny_bundle)), plain)


def test_a_model_with_another_head_is_loaded_again(tiny_target_folder, tokenizer, tiny_bundle):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    given = inputs(tokenizer)
    before = model.generate(**given, **call(tiny_bundle))
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    torch.manual_seed(1)
    torch.nn.init.normal_(head.weight)
    model.set_output_embeddings(head)
    plain = model.generate(**given, do_sample=False, max_new_tokens=12)
    assert torch.equal(model.generate(**given, **call(tiny_bundle)), plain) and not torch.equal(plain, before)


def test_a_policy_is_a_tree(tiny_target_folder, tokenizer, tiny_bundle):
    """And one that is made again for each call is loaded once."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    expected = model.generate(**inputs(tokenizer), **call(tiny_bundle))
    before = len(getattr(model, LOADED).decoders)
    decoders = set()
    for _ in range(3):
        found = model.generate(**inputs(tokenizer), **call(tiny_bundle, tree=ChainPolicy(3)))
        assert torch.equal(found, expected)
        decoders.add(id(list(getattr(model, LOADED).decoders.values())[-1][1]))
    assert len(getattr(model, LOADED).decoders) == before + 1 and len(decoders) == 1


def test_threads_take_turns(tiny_target_folder, tokenizer, tiny_bundle):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    prompts = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    expected = [model.generate(**given, do_sample=False, max_new_tokens=12).tolist() for given in prompts]
    found = [None] * len(prompts)

    def decode(number):
        found[number] = model.generate(**prompts[number], **call(tiny_bundle)).tolist()

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_virtual_tokens_are_refused(tiny_target_folder, tokenizer, tiny_bundle):
    from peft import PromptTuningConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(UserError, match="model: must be one that prepares its inputs itself"):
        tuned.generate(**inputs(tokenizer), **call(tiny_bundle))


def test_rope_that_stretches_is_refused_beyond_its_limit(tiny_target_folder, tokenizer, tiny_bundle):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    given = inputs(tokenizer)
    limit = given["input_ids"].shape[1] + 8
    rope = {"rope_type": "longrope", "original_max_position_embeddings": limit}
    model.config.rope_parameters = model.config.rope_parameters | rope
    with pytest.raises(
        UserError, match=f"max_length: must be at most {limit} with this rope, got {limit + 4}"
    ):
        model.generate(**given, **call(tiny_bundle))
    model.generate(**given, **call(tiny_bundle, max_new_tokens=8))
    own = {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(limit + 4)])}
    with pytest.raises(UserError, match=f"max_length: must be at most {limit} with this rope"):
        model.generate(**given, **call(tiny_bundle, max_new_tokens=8, **own))
    model.config.rope_parameters = {"full_attention": model.config.rope_parameters}
    with pytest.raises(UserError, match=f"max_length: must be at most {limit} with this rope"):
        model.generate(**given, **call(tiny_bundle))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "generation mode: must be greedy search or sampling, got beam_search"),
        ({"use_cache": False}, "use_cache: must be on"),
        ({"cache_implementation": "static"}, "cache_implementation: must be dynamic, got static"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions: must be off"),
        ({"guidance_scale": 1.5}, "guidance_scale: must be null, got 1.5"),
        ({"tree": "drawn:k_config=2-1"}, "tree: must have deterministic candidates"),
        ({"tree": "nothing"}, "nothing"),
        ({"drafter": "/nonexistent"}, "/nonexistent"),
        ({"ngrams": "/nonexistent"}, "/nonexistent: neither an n-gram cache .*; make one with drafttrain "),
        ({"max_new_tokens": 600}, "prompt and new tokens must fit into the 512 positions"),
        ({"tokenizer": "nonsense", "stop_strings": "a"}, "tokenizer: must be one of transformers"),
        ({"n": 2, "streamer": "x"}, "streamer: must be left out with several rows, got 2"),
        ({"n": 2, "output_scores": True, "return_dict_in_generate": True}, "output_scores: must be off with"),
        ({"right": True, "n": 4}, "attention_mask: must be .* padding on the left alone"),
        ({"positions": True}, "position_ids: must be 0, 1, 2"),
        ({"ids": -100}, "input_ids: must be from 0 to [0-9]+, got others"),
        ({"ids": 10**6}, "input_ids: must be from 0 to [0-9]+, got others"),
        ({"past_key_values": DynamicCache()}, ": must be left out, got DynamicCache"),
        (
            {"n": 2, "logits_processor": [ByRow()]},
            "logits_processor: must be of one row at a time with several rows, got ByRow",
        ),
        ({"n": 2, "logits_processor": [BanOfRow()]}, "logits_processor: must be of one row at a time"),
        ({"n": 2, "stopping_criteria": [AnyEnds()]}, "of one row at a time with several rows, got AnyEnds"),
        ({"n": 2, "endless": True, "max_time": 9.0}, "eos_token_id: must be given with stopping criteria"),
        ({"prefill_chunk_size": 2}, "prefill_chunk_size: must be null"),
        (
            {"n": 2, "stopping_criteria": [EndsByRow()]},
            "stopping_criteria: must be of one row at a time",
        ),
        ({"n": 2, "endless": True, "stopping_criteria": [AtLength()]}, "eos_token_id: must be given"),
    ],
)
def test_what_it_does_not_do_is_one_error(options, message, tiny_target_folder, tokenizer, tiny_bundle):
    options = dict(options)
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    given = dict(inputs(tokenizer, options.pop("n", 1)))
    if options.pop("endless", False):
        model.generation_config.eos_token_id = None
    if options.pop("right", False):
        given = {name: value.flip(1) for name, value in given.items()}
    if options.pop("positions", False):
        given["position_ids"] = torch.arange(given["input_ids"].shape[1])[None] + 3
    if "ids" in options:
        given["input_ids"][0, 1] = options.pop("ids")
    if options.get("streamer"):
        options["streamer"] = TextIteratorStreamer(tokenizer)
        options["streamer"].put = lambda value: None
    call = {"drafter": tiny_bundle, "tree": TREES[0], "max_new_tokens": 3, **options}
    with pytest.raises(UserError, match=message) as found:
        model.generate(**given, custom_generate=drafttrain.generate, **call)
    assert "\n" not in str(found.value)


def test_a_config_object_counts(model, tokenizer, tiny_bundle):
    config = GenerationConfig(max_new_tokens=7, do_sample=False, repetition_penalty=1.5, pad_token_id=0)
    given = inputs(tokenizer, 3)
    plain = model.generate(**given, generation_config=copy.deepcopy(config))
    drafted = model.generate(
        **given,
        generation_config=copy.deepcopy(config),
        custom_generate=drafttrain.generate,
        drafter=tiny_bundle,
        tree=TREES[0],
    )
    assert torch.equal(plain, drafted)
