"""SpeculativeDecoder: prompts in every form, text out piece by piece, the same with and without drafts."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from drafttrain.data.message import Message
from drafttrain.decoder import SpeculativeDecoder
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.inference.decode import decode
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.inference.rejection import _Whole
from drafttrain.inference.stats import DecodeStats
from drafttrain.inference.stop import StopStrings
from drafttrain.inference.text import TextStream
from drafttrain.reasoning.prefixes import PrefixStore
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.chain import ChainPolicy
from drafttrain.utils.errors import UserError

PROMPT = "Could you please explain how the sun is shining?"
TEXTS = [
    "The river, step by step.",
    "naïve café — “quotes” … 日本語の文章、한국어 العربية",
    "😀👍🏽 e\u0301 and \ufffd genuine, then 🏴\u200d☠️",
    "  spaces   and\n\n\tlines ",
]


def decode_text(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_streamed_text_is_the_text(tiny_llama, text, size):
    tokenizer = tiny_llama[1]
    ids = tokenizer(text)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) + stream.flush() == decode_text(tokenizer, ids) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)  # no half characters on the screen


@given(st.lists(st.integers(0, 511), max_size=30), st.integers(1, 6))
def test_streamed_text_of_any_tokens(tiny_llama, ids, size):
    """Also of bytes that form no character, and of special tokens, which have no text."""
    tokenizer = tiny_llama[1]
    ids = [token % len(tokenizer) for token in ids]
    stream = TextStream(tokenizer)
    pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) + stream.flush() == decode_text(tokenizer, ids)


def test_tokens_whose_space_depends_on_the_one_before():
    """SentencePiece style: the first word of a text loses its space, also after a special token."""
    tokenizer = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "<s>": 2}, unk_token="▁one"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    for ids in ([2, 0, 2, 1, 2, 2, 0], [0, 1], [2, 2, 1, 0]):
        stream = TextStream(tokenizer)
        assert "".join(stream.push([token]) for token in ids) == decode_text(tokenizer, ids)


def test_text_is_given_out_as_soon_as_it_is_certain(tiny_llama):
    tokenizer = tiny_llama[1]
    stream = TextStream(tokenizer)
    first, *others = tokenizer("é")["input_ids"]
    assert others  # two bytes, two tokens
    the = tokenizer("The")["input_ids"]
    assert stream.push([*the, first]) == "The"  # the whole token does not wait for the half one
    assert stream.push(others) == "é"
    assert stream.push([first]) == "" and stream.flush() == "\ufffd"


@given(st.lists(st.integers(0, 7), max_size=12), st.integers(1, 5))
def test_bytes_of_sentencepiece(ids, size):
    """A run of them is decoded at once: if a part of it is no character, none of its bytes is."""
    pieces = ["a", "<0xE4>", "<0xBD>", "<0xA0>", "<0xE5>", "b", "<s>", "é"]
    made = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="a"))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    stream = TextStream(tokenizer)
    found = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(found) + stream.flush() == decode_text(tokenizer, ids)


@pytest.fixture
def decoder(target, replay, greedy, request) -> SpeculativeDecoder:
    """Drafts rightly half of the time for the reply to PROMPT."""
    ids = SpeculativeDecoder(target, NoProposer()).encode(PROMPT)
    text = ids + greedy(target, ids, 40)
    drafter = replay(target, [text], lambda row, position: position % 3 > 0)
    return SpeculativeDecoder(target, TreeProposer(drafter, ChainPolicy(4)))


def test_generate_autoregressive_and_stream_agree(decoder, target, greedy):
    [eos] = target.eos_token_ids
    wanted = greedy(target, decoder.encode(PROMPT), 30, eos)
    result, plain, stats = decoder.generate(PROMPT, 30), decoder.autoregressive(PROMPT, 30), DecodeStats()
    pieces = list(decoder.stream(PROMPT, 30, stats))
    assert result.token_ids == plain.token_ids == wanted
    assert [token for piece in pieces for token in piece.token_ids] == wanted
    assert result.text == plain.text == "".join(piece.text for piece in pieces)
    assert result.text == decode_text(target.tokenizer, wanted)
    reason = "stop" if wanted[-1] == eos else "length"
    assert result.finish_reason == plain.finish_reason == pieces[-1].finish_reason == reason
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    assert stats.steps == result.stats.steps == len(pieces) - 1 < plain.stats.steps
    assert result.stats.accept_len > plain.stats.accept_len == 1


def test_prompts_in_every_form(tiny_llama):
    model, tokenizer = tiny_llama
    decoder = SpeculativeDecoder(FrozenTarget(model, tokenizer, "llama"), NoProposer())
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
    assert decoder.encode(PROMPT) == ids
    assert decoder.encode([{"role": "user", "content": PROMPT}]) == ids
    assert decoder.encode([Message("user", PROMPT)]) == ids
    assert decoder.encode(ids) == ids
    assert decoder.encode(torch.tensor(ids)) == decoder.encode(torch.tensor([ids])) == ids
    message = {"role": "user", "content": "a"}
    for wrong in ([1, "a"], [message, 3], message, {}, None, 5, {"input_ids": [1, 2]}, torch.ones(3).bool()):
        with pytest.raises(UserError, match="prompt: must be a text, a chat .* got "):
            decoder.generate(wrong, 4)


def test_plain_text_without_a_chat_template(tiny_llama, monkeypatch):
    model, tokenizer = tiny_llama
    monkeypatch.setattr(tokenizer, "chat_template", None)
    decoder = SpeculativeDecoder(FrozenTarget(model, tokenizer, "llama"), NoProposer())
    assert decoder.encode("The sun") == tokenizer("The sun")["input_ids"]


def test_without_a_tokenizer_token_ids_still_work(tiny_llama):
    decoder = SpeculativeDecoder(FrozenTarget(tiny_llama[0], None, "nameless"), NoProposer())
    with pytest.raises(UserError, match="prompt: must be token ids, as nameless has no tokenizer, got "):
        decoder.generate("The sun")
    result = decoder.generate([5, 6, 7], 4)
    assert result.text == "" and result.token_ids


def test_empty_prompt(tiny_llama):
    decoder = SpeculativeDecoder(FrozenTarget(*tiny_llama, "llama"), NoProposer())
    with pytest.raises(UserError, match="prompt 0: must have at least one token, got none"):
        decoder.generate([])
    for empty in ("", ["The sun", ""]):
        with pytest.raises(UserError, match="prompt: must not be empty"):
            decoder.generate(empty)


@pytest.mark.parametrize("draws", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_list_of_prompts_gives_what_each_gives_alone(tiny_llama, draws):
    """Texts, chats and ids; whole and as a stream; with a stop string in one of them."""
    decoder = SpeculativeDecoder(FrozenTarget(*tiny_llama, "llama"), NoProposer())
    ids = decoder.encode("The river")
    prompts = [PROMPT, [{"role": "user", "content": "The sun"}], ids, torch.tensor(ids[:-2])]
    alone = [decoder.generate(prompt, 12, **draws) for prompt in prompts]
    stop = next(one.text[2:5] for one in alone if len(one.text) > 5)
    for stops in ((), stop):
        alone = [decoder.generate(prompt, 12, stop=stops, **draws) for prompt in prompts]
        together = decoder.generate(prompts, 12, stop=stops, **draws)
        for one, other in zip(alone, together, strict=True):
            assert (one.text, one.token_ids, one.finish_reason) == (
                other.text,
                other.token_ids,
                other.finish_reason,
            )
        # nothing is decoded after a stop string, while the others go on
        assert together[0].stats.new_tokens == sum(len(one.token_ids) for one in alone)
        texts = [""] * len(prompts)
        for piece in decoder.stream(prompts, 12, stop=stops, **draws):
            texts[piece.prompt] += piece.text
        assert texts == [one.text for one in alone]


def test_parameters_one_by_one(target):
    decoder = SpeculativeDecoder(target, NoProposer())
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=3)
    one_by_one = decoder.generate(PROMPT, 12, temperature=1.0, top_p=0.95, seed=3)
    assert one_by_one.token_ids == decoder.generate(PROMPT, 12, sampling).token_ids
    with pytest.raises(UserError, match="max_length: must be one of .*, max_tokens; write max_new_tokens"):
        decoder.generate(PROMPT, max_length=3)
    with pytest.raises(UserError, match="num_beams: must be one of .*, max_tokens; leave it out"):
        decoder.generate(PROMPT, num_beams=3)
    with pytest.raises(UserError, match="seed: must not be given beside sampling"):
        decoder.generate(PROMPT, 12, sampling, seed=4)


def test_a_limit_among_the_parameters(target):
    """As vLLM's users write it; in place of max_new_tokens, below and above it."""
    decoder = SpeculativeDecoder(target, NoProposer())
    whole = decoder.generate([5, 6, 7], 300).token_ids
    assert len(whole) > 20
    for limit in (3, 20):
        sampling = SamplingParams(max_tokens=limit)
        for generate in (decoder.generate, decoder.autoregressive):
            assert generate([5, 6, 7], 8, sampling).token_ids == whole[:limit]
        assert decoder.generate([5, 6, 7], max_tokens=limit).token_ids == whole[:limit]
        streamed = [
            token for piece in decoder.stream([5, 6, 7], 8, sampling=sampling) for token in piece.token_ids
        ]
        assert streamed == whole[:limit]
    limits = [SamplingParams(max_tokens=3), SamplingParams(), SamplingParams(max_tokens=20)]
    many = decoder.generate_many([[5, 6, 7]] * 3, 8, sampling=limits)
    assert [one.token_ids for one in many] == [whole[:3], whole[:8], whole[:20]]
    with pytest.raises(UserError, match="positions"):
        decoder.generate([5, 6, 7], max_tokens=10**6)


def test_many_prompts_have_to_be_a_list(target):
    decoder = SpeculativeDecoder(target, NoProposer())
    for prompts, message in (("a", "got a single text"), (5, "got 5"), (iter(["a"]), "got <list_iterator")):
        with pytest.raises(UserError, match=f"prompts: must be a list.*{message}"):
            decoder.generate_many(prompts, 4)


def test_many_prompts_share_their_beginnings_unless_it_is_switched_off(target, monkeypatch):
    encoded, start = [], PrefixStore.sessions

    def noted(self, *given):
        encoded.append(self.encoded)
        return start(self, *given)

    monkeypatch.setattr(PrefixStore, "sessions", noted)
    decoder = SpeculativeDecoder(target, NoProposer())
    prompts = [[5, 6, 7]] * 3
    shared, alone = (decoder.generate_many(prompts, 8, prefixes=prefixes) for prefixes in (True, False))
    assert [one.token_ids for one in shared] == [one.token_ids for one in alone]
    assert max(encoded) == 9 and min(encoded) == 3


@pytest.mark.parametrize(
    "given, message",
    [
        ({"prompt": [5, 512]}, "prompt: token ids must be in 0..511, got 512"),
        ({"prompt": [-1]}, "prompt: token ids must be in 0..511, got -1"),
        (
            {"prompt": [{"role": "user"}]},
            "prompt: a turn's role and content must be texts, got .'role': 'user'",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            "prompt: a turn's role and content must be texts, got ",
        ),
        (
            {"prompt": [torch.ones(2, 3, dtype=torch.long)]},
            r"prompt: must be one row of token ids, got shape",
        ),
        (
            {"prompt": [{"role": "user\udc80", "content": "a"}]},
            "prompt: must be whole characters, got .*; correct its encoding",
        ),
        ({"prompt": b"The sun"}, "prompt: must be a text, a chat .*, got b'The sun'"),
        ({"prompt": torch.tensor(5)}, r"prompt: must be one row of token ids, got shape \[\]"),
        ({"stop": [1]}, r"stop: must be a text or a list of texts, got \[1\]"),
        ({"stop": 1}, "stop: must be a text or a list of texts, got 1"),
        ({"stop": ["a", ""]}, "stop: must not hold an empty text; leave it out"),
        ({"max_new_tokens": "4"}, "max_new_tokens: must be a whole number >= 1, got '4'"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: must be a whole number >= 1, got 2.5"),
        ({"max_new_tokens": None}, "max_new_tokens: must be a whole number >= 1, got None"),
        ({"max_new_tokens": -1}, "max_new_tokens: must be a whole number >= 1, got -1"),
        ({"temperature": "hot"}, "temperature: must be a number, got 'hot'"),
        ({"temperature": None}, "temperature: must be a number, got None"),
        ({"temperature": 1.0, "seed": 1.5}, "seed: must be a whole number, got 1.5"),
        ({"top_k": 1.5}, "top_k: must be a whole number or None, got 1.5"),
        ({"max_tokens": 2.5}, "max_tokens: must be a whole number or None, got 2.5"),
        ({"sampling": 0.8}, "sampling: must be SamplingParams, got 0.8"),
    ],
)
def test_what_cannot_be_generated_is_one_line(target, given, message):
    decoder = SpeculativeDecoder(target, NoProposer())
    with pytest.raises(UserError, match=message):
        decoder.generate(**{"prompt": "The sun", "max_new_tokens": 4, **given})


def test_what_is_no_bundle_target_or_tree_is_one_line(tiny_bundle, tiny_llama):
    with pytest.raises(UserError, match="path: must be a folder or Hub id, got None"):
        SpeculativeDecoder.from_pretrained(None)
    for name in ("calibration", "ngrams"):
        with pytest.raises(UserError, match=f"{name}: must be a folder or Hub id, got 5"):
            SpeculativeDecoder.from_pretrained(str(tiny_bundle), **{name: 5})
    with pytest.raises(UserError, match="^device: 'gpu' cannot be used .*; try auto"):
        SpeculativeDecoder.from_pretrained(str(tiny_bundle), device="gpu")
    with pytest.raises(UserError, match="target: must be a FrozenTarget, got .*; call .*from_pretrained"):
        SpeculativeDecoder(str(tiny_bundle), NoProposer())
    with pytest.raises(UserError, match="tree: must be a policy or its name, got "):
        SpeculativeDecoder.from_pretrained(str(tiny_bundle), tree=ChainPolicy)
    for make in (
        lambda target: SpeculativeDecoder.from_pretrained(str(tiny_bundle), target),
        SpeculativeDecoder.self_draft,
    ):
        with pytest.raises(UserError, match="target: must be a folder, a Hub id or a loaded model, got "):
            make(object())
        with pytest.raises(UserError, match="target: must know where its tokenizer is"):
            make(tiny_llama[0])


def test_a_loaded_model_and_a_policy(tiny_bundle, tiny_target_folder):
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder, dtype="float32")
    decoder = SpeculativeDecoder.from_pretrained(str(tiny_bundle), model, tree=ChainPolicy(2))
    named = SpeculativeDecoder.from_pretrained(
        str(tiny_bundle), dtype="float32", device="cpu", tree="chain:length=2"
    )
    result = decoder.generate(PROMPT, 12)
    assert result.stats.verify_tokens > 0
    assert result.token_ids == decoder.autoregressive(PROMPT, 12).token_ids
    assert result.token_ids == named.generate(PROMPT, 12).token_ids
    assert all(weight.requires_grad for weight in model.parameters())  # it can be trained afterwards


@pytest.mark.parametrize("tree", ["eagle2:top_k=3,max_depth=3,total=8", "cape", "drawn:k_config=2-1"])
@pytest.mark.parametrize("native", [True, False])
def test_another_default_dtype_changes_nothing(native, tree, tiny_bundle, monkeypatch):
    """As while another thread of the program loads a model in bf16."""
    if not native:
        monkeypatch.setenv("DRAFTTRAIN_KERNELS", "off")
    decoder = SpeculativeDecoder.from_pretrained(str(tiny_bundle), dtype="float32", device="cpu", tree=tree)

    def texts() -> list[list[int]]:
        found = [decoder.generate(PROMPT, 12, seed=3).token_ids] if tree[:5] != "drawn" else []
        for top_p in (1.0, 0.95):  # 0.7 and 0.95 are others in bf16, by more than their inverse's rounding
            sampling = {"temperature": 0.7, "top_p": top_p}
            found += [decoder.generate(PROMPT, 24, seed=seed, **sampling).token_ids for seed in range(6)]
        return found

    expected = texts()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = texts()
    finally:
        torch.set_default_dtype(torch.float)
    assert found == expected


def test_probabilities_of_drawn_trees_do_not_follow_the_default_dtype():
    logits = torch.linspace(0, 20, 50)
    expected = _Whole(logits, 0.7, 0.5).log_mass
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert _Whole(logits, 0.7, 0.5).log_mass == expected
    finally:
        torch.set_default_dtype(torch.float)


def test_a_long_list_is_decoded_some_prompts_at_a_time(target, monkeypatch):
    monkeypatch.setattr("drafttrain.inference.decode.MOST_ROWS", 2)
    decoder, prompts = SpeculativeDecoder(target, NoProposer()), [[i] for i in range(3, 8)]
    many = decoder.generate(prompts, 6)
    assert [one.token_ids for one in many] == [decoder.generate(one, 6).token_ids for one in prompts]
    assert max(len(step.rows) for step in decode(target, NoProposer(), prompts, 6)) == 2


def test_samples_by_seed(target):
    decoder = SpeculativeDecoder(target, NoProposer())
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=3)
    one = decoder.generate(PROMPT, 20, sampling)
    assert one.token_ids == decoder.autoregressive(PROMPT, 20, sampling).token_ids
    assert one.token_ids == [
        t for piece in decoder.stream(PROMPT, 20, sampling=sampling) for t in piece.token_ids
    ]
    assert one.token_ids != decoder.generate(PROMPT, 20).token_ids
    assert one.token_ids != decoder.generate(PROMPT, 20, SamplingParams(1.0, 0.95, seed=4)).token_ids


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.integers(1, 5),
)
def test_stop_strings_cut_where_the_first_is_complete(text, strings, size):
    """Against a search in every beginning of the text, in any pieces."""
    stops = StopStrings(strings, tokenizer=object())
    given_out = ""
    for i in range(0, len(text), size):
        given_out += stops.push(text[i : i + size])
        if stops.found:
            break
        held = text[: i + size][len(given_out) :]
        assert not held or any(string.startswith(held) for string in strings)
    given_out += "" if stops.found else stops.flush()
    expected, found = text, False
    for end in range(len(text) + 1):
        complete = [string for string in strings if text[:end].endswith(string)]
        if complete:
            expected, found = text[: end - max(map(len, complete))], True
            break
    assert (given_out, stops.found) == (expected, found)


def test_a_stop_string_ends_the_text(decoder):
    """It may begin and end inside tokens and inside a draft; with and without drafts the same is left."""
    whole = decoder.generate(PROMPT, 40)
    for start in (3, 10, len(whole.text) - 4):
        stop = whole.text[start : start + 3]
        expected = whole.text[: whole.text.index(stop)]
        for result in (
            decoder.generate(PROMPT, 40, stop=[stop]),
            decoder.generate(PROMPT, 40, stop=stop),  # not its letters
            decoder.autoregressive(PROMPT, 40, stop=[stop]),
        ):
            assert result.text == expected and result.finish_reason == "stop"
            assert result.token_ids == whole.token_ids[: len(result.token_ids)]
        streamed = "".join(piece.text for piece in decoder.stream(PROMPT, 40, stop=[stop]))
        assert streamed == expected
    assert decoder.generate(PROMPT, 40, stop=["\ufffd never \ufffd"]).text == whole.text
    with pytest.raises(UserError, match="stop: must not hold an empty text"):
        decoder.generate(PROMPT, 4, stop=[""])


def test_what_follows_a_stop_string_is_not_counted(decoder):
    """In the middle of a step, and where the step ends the output by its length as well."""
    whole = decoder.generate(PROMPT, 40)
    for limit in (40, 12, 11, 10):
        text = decoder.autoregressive(PROMPT, limit).text
        for start in range(2, len(text) - 3, 3):
            stop = text[start : start + 3]
            result = decoder.generate(PROMPT, limit, stop=[stop])
            assert (
                result.finish_reason == "stop"
                and result.token_ids == whole.token_ids[: len(result.token_ids)]
            )
            stats, emitted = result.stats, len(result.token_ids)
            assert stats.new_tokens == emitted and sum(stats.granted) <= emitted - 1
            assert (
                all(a <= b for a, b in zip(stats.granted, stats.offered))
                and min(stats.granted, default=0) >= 0
            )
            assert stats.repeated_tokens + stats.fresh_tokens == emitted - 1
            plain = decoder.autoregressive(PROMPT, limit, stop=[stop])
            assert plain.stats.new_tokens == len(plain.token_ids) and plain.stats.accept_len in (0, 1)


def test_a_target_without_a_tokenizer_has_no_stop_strings(tiny_llama):
    decoder = SpeculativeDecoder(FrozenTarget(tiny_llama[0], None, "llama"), NoProposer())
    with pytest.raises(UserError, match="stop: must be left out for a target without a tokenizer"):
        decoder.generate([5, 6, 7], 4, stop=["a"])


@pytest.mark.parametrize("prompt", ["caf\udce9", [{"role": "user", "content": "half \ud83d"}]])
def test_half_characters_are_refused(decoder, prompt):
    with pytest.raises(UserError, match="prompt: must be whole characters, got .*; correct its encoding"):
        decoder.generate(prompt, 4)


def test_each_prompt_has_parameters_for_sampling(decoder):
    with pytest.raises(UserError, match="sampling: must be SamplingParams for each prompt, got {'temp"):
        decoder.generate_many([PROMPT] * 2, 4, sampling=[{"temperature": 1.0}] * 2)


def test_n_grams_are_in_a_folder(target):
    with pytest.raises(UserError, match="ngrams: must be a folder, got 5"):
        SpeculativeDecoder.self_draft(target, ngrams=5)


def test_longrope_is_not_decoded_beyond_its_original_positions(tiny_llama):
    """There it turns the keys of all texts of a forward otherwise."""
    target = FrozenTarget(*tiny_llama, "llama")
    target.config = copy.deepcopy(target.config)
    assert target.positions == target.config.max_position_embeddings == 512
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 40}
    for parameters in (rope, {"full_attention": rope}):
        target.config.rope_parameters = parameters
        assert target.positions == 40
        with pytest.raises(UserError, match="must fit into the 40 positions of llama, got 30 [+] 11"):
            SpeculativeDecoder(target, NoProposer()).generate(list(range(3, 33)), 11)


def test_decoders_of_one_target_keep_their_taps(tiny_target, tiny_bundle):
    """Another drafter that reads other blocks is attached to the target meanwhile."""
    first = SpeculativeDecoder.from_pretrained(tiny_bundle, target=tiny_target, tree="chain:length=3")
    expected = first.generate(PROMPT, 12)
    tiny_target.tap([0, 1, 2])
    found = first.generate(PROMPT, 12)
    assert found.token_ids == expected.token_ids
    assert found.stats.accept_len == expected.stats.accept_len


def test_a_second_decoder_of_the_first_ones_target_changes_nothing(tiny_target, tiny_bundle, tmp_path):
    """Its drafter reads other states, and more of them."""
    first = SpeculativeDecoder.from_pretrained(tiny_bundle, target=tiny_target, tree="chain:length=3")
    expected = first.generate(PROMPT, 12)
    config = DrafterConfig(kind="edd", tapped_blocks=[0, 1, 2], draft_vocab_size=100)
    new_drafter(tiny_target, config, torch.arange(100)).save_pretrained(tmp_path / "other")
    SpeculativeDecoder.from_pretrained(str(tmp_path / "other"), target=first.target, tree="chain:length=2")
    found = first.generate(PROMPT, 12)
    assert found.stats.accept_len == expected.stats.accept_len
    with pytest.raises(UserError, match="prompts: must be a list, got a single text"):
        first.generate_many(PROMPT, 4)
