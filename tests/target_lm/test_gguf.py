"""Conversion of GGUF files: tiny ones written here with known contents, and SmolLM2's.

Every way in which a GGUF is known to come out wrong has a test, and where the test could be vacuous it first
shows that the wrong result differs.
"""

import copy
import json
from pathlib import Path

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafttrain.target_lm import gguf
from drafttrain.target_lm.gguf import convert_gguf, read_gguf
from drafttrain.utils.errors import UserError

ROPE_THETA = 100_000.0


def with_rope(model: PreTrainedModel, **rope) -> PreTrainedModel:
    """A copy of the model with bf16 weights (kept in fp32) and another rope."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": ROPE_THETA, **rope}
    changed = type(model)(config).eval()
    changed.load_state_dict({name: tensor.bfloat16() for name, tensor in model.state_dict().items()})
    return changed


@pytest.fixture(params=["llama", "qwen2"])
def tiny(request, tiny_llama, tiny_qwen2):
    """(model, tokenizer) of each architecture, with the rope of the quickstart target."""
    model, tokenizer = {"llama": tiny_llama, "qwen2": tiny_qwen2}[request.param]
    return with_rope(model), tokenizer


@pytest.fixture
def convert(tmp_path, write_gguf):
    """Writes a GGUF, converts it, and returns the folder and the reported facts."""

    def run(model, tokenizer, **options) -> tuple[Path, dict]:
        folder = tmp_path / "converted"
        folder.mkdir()
        return folder, convert_gguf(write_gguf(tmp_path / "tiny.gguf", model, tokenizer, **options), folder)

    return run


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits  # [1, n, V]


# weights and rope


def test_logits_equal_those_of_the_model_in_the_file(tiny, convert):
    model, tokenizer = tiny
    folder, facts = convert(model, tokenizer)
    ids = torch.randint(3, 512, (1, 300))  # long enough for rope's slow frequencies to matter
    expected = logits(model, ids)
    assert (logits(load(folder), ids) - expected).abs().max() < 1e-4
    other_rope = with_rope(model, rope_theta=10_000.0)
    assert (logits(other_rope, ids) - expected).abs().max() > 0.1, "a lost rope_theta would not be noticed"
    assert facts == {
        "architecture": model.config.model_type,
        "parameters": model.num_parameters(),
        "tied": False,
        "tokens": 512,
        "embedding_rows": 512,
    }


def test_rope_survives_saving_and_loading(tiny, convert, tmp_path):
    model, tokenizer = tiny
    folder, _ = convert(model, tokenizer)
    load(folder).save_pretrained(tmp_path / "again")
    for place in (folder, tmp_path / "again"):
        rope = load(place).config.rope_parameters
        assert (rope["rope_theta"], rope["rope_type"]) == (ROPE_THETA, "default")


def test_dequantized_weights_can_be_saved_and_trained(tiny, convert, tmp_path):
    model, tokenizer = tiny
    name = "model.layers.2.mlp.up_proj.weight"
    folder, _ = convert(model, tokenizer, quantization={"blk.2.ffn_up.weight": "Q8_0"})
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.bfloat16}

    loaded = load(folder)
    weight = model.state_dict()[name].numpy()
    packed = quants.quantize(weight, GGMLQuantizationType.Q8_0)
    unpacked = torch.from_numpy(quants.dequantize(packed, GGMLQuantizationType.Q8_0))
    assert torch.equal(loaded.state_dict()[name], unpacked.bfloat16().float())
    assert not torch.equal(unpacked.bfloat16(), torch.from_numpy(weight).bfloat16())

    loaded.train()(torch.arange(3, 20)[None]).logits.logsumexp(-1).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in loaded.parameters())
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again").state_dict()[name], loaded.state_dict()[name])


def llama3_factors(config) -> numpy.ndarray:
    """Return what llama.cpp stores: the unscaled frequencies over the scaled ones, [head_dim / 2]."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    n = len(scaled)
    plain = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(n) / n)
    return (plain / scaled).numpy()


def test_llama3_rope_comes_back(tiny_llama, convert):
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192, **scaling}
    model = with_rope(tiny_llama[0], **rope)
    factors = llama3_factors(model.config)
    assert factors.min() == pytest.approx(1) and factors.max() == pytest.approx(32)
    folder, _ = convert(model, tiny_llama[1], replace={"rope_freqs.weight": factors})
    loaded = load(folder)
    assert loaded.config.rope_parameters == pytest.approx(rope)
    ids = torch.randint(3, 512, (1, 300))
    assert (logits(loaded, ids) - logits(model, ids)).abs().max() < 1e-4


def test_other_scaled_rope_is_refused(tiny_llama, convert, tmp_path, write_gguf):
    factors = numpy.linspace(1, 9, 8, dtype=numpy.float32)
    with pytest.raises(UserError, match="rope_freqs are not those of a Llama 3"):
        convert(*tiny_llama, replace={"rope_freqs.weight": factors})
    path = write_gguf(tmp_path / "yarn.gguf", *tiny_llama, metadata={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(UserError, match=r"yarn.gguf: its rope scaling \(yarn\) would be lost"):
        convert_gguf(path, tmp_path)


@pytest.mark.parametrize(
    "metadata, lost",
    [
        ({"llama.rope.scaling.factor": 4.0}, r"rope scaling \(scaling.factor 4\)"),
        ({"llama.rope.scale_linear": 2.0}, r"rope scaling \(scale_linear 2\)"),
        ({"llama.rope.scaling.attn_factor": 1.19}, r"rope scaling \(scaling.attn_factor 1.19\)"),
    ],
)
def test_what_scales_rope_without_a_type_is_refused(metadata, lost, tiny_llama, tmp_path, write_gguf):
    path = write_gguf(tmp_path / "old.gguf", *tiny_llama, metadata=metadata)
    with pytest.raises(UserError, match=f"old.gguf: its {lost} would be lost"):
        convert_gguf(path, tmp_path)


@pytest.mark.parametrize("name", ["rope_factors_long.weight", "blk.0.attn_q.bias"])
def test_tensors_that_have_no_place_are_refused(name, tiny_llama, convert):
    """Longrope's factors, and biases where Llama has none."""
    with pytest.raises(UserError, match="(rope scaling|biases .blk.0.attn_q.bias.).* would be lost"):
        convert(*tiny_llama, replace={name: numpy.ones(64, dtype=numpy.float32)})


def test_a_base_of_rope_that_is_not_read_is_refused(tiny_llama, convert, monkeypatch):
    """As transformers reads none of StarCoder 2's."""
    real = gguf.AutoModelForCausalLM.from_pretrained

    def without_base(*args, **options):
        model, info = real(*args, **options)
        model.config.rope_parameters["rope_theta"] = 10000.0
        return model, info

    monkeypatch.setattr(gguf.AutoModelForCausalLM, "from_pretrained", without_base)
    with pytest.raises(UserError, match=r"its rope.freq_base \(500000\) would be lost"):
        convert(with_rope(tiny_llama[0], rope_theta=5e5), tiny_llama[1])


# head and embedding


def test_two_quantizations_of_one_matrix_are_tied_again(tiny, convert):
    model, tokenizer = tiny
    matrix = model.get_input_embeddings().weight.numpy(force=True)
    folder, facts = convert(
        model,
        tokenizer,
        replace={"output.weight": matrix},
        quantization={"token_embd.weight": "Q5_0", "output.weight": "Q8_0"},
    )
    assert facts["tied"] and facts["parameters"] == model.num_parameters() - matrix.size
    loaded = load(folder)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()
    finer = quants.dequantize(quants.quantize(matrix, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert torch.equal(loaded.get_input_embeddings().weight, torch.from_numpy(finer).bfloat16().float())


def test_one_row_of_its_own_keeps_the_head_apart(tiny, convert):
    model, tokenizer = tiny
    matrix = model.get_input_embeddings().weight.numpy(force=True)
    head = matrix.copy()
    head[300] += 0.1
    folder, facts = convert(model, tokenizer, replace={"output.weight": head})
    loaded = load(folder)
    assert not facts["tied"] and not loaded.config.tie_word_embeddings
    assert torch.equal(loaded.get_output_embeddings().weight, torch.from_numpy(head).bfloat16().float())
    assert torch.equal(loaded.get_input_embeddings().weight, torch.from_numpy(matrix))


def test_a_file_without_output_matrix_is_tied(tiny, convert):
    model, tokenizer = tiny
    folder, facts = convert(model, tokenizer, replace={"output.weight": None})
    loaded = load(folder)
    assert facts["tied"]
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


# tokenizer


@pytest.fixture(scope="session")
def digit_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges join digits and whole words, as far as its pre-tokenizer lets them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" 2024 in 2024, café café 12345 é"] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<repo_name>"],
        chat_template="{{ messages[0]['content'] }}",
    )


@pytest.fixture
def converted_tokenizer(tiny_llama, digit_tokenizer, convert):
    def run(**options) -> PreTrainedTokenizerFast:
        return AutoTokenizer.from_pretrained(convert(tiny_llama[0], digit_tokenizer, **options)[0])

    return run


@pytest.mark.parametrize("pre, pieces", [("gpt-2", ["Ġ2024"]), ("smollm", ["Ġ", "2", "0", "2", "4"])])
def test_pre_tokenizer_decides_about_digits(converted_tokenizer, pre, pieces):
    tokenizer = converted_tokenizer(pre=pre)
    ids = tokenizer(" 2024").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == " 2024"


def test_qwen2_normalizes_and_others_do_not(tiny_llama, digit_tokenizer, tmp_path, write_gguf):
    ids = {}
    for pre in ("qwen2", "gpt-2"):
        folder = tmp_path / pre
        folder.mkdir()
        convert_gguf(write_gguf(tmp_path / f"{pre}.gguf", tiny_llama[0], digit_tokenizer, pre=pre), folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids[pre] = [tokenizer(text).input_ids for text in ("café", "cafe\u0301")]
    assert ids["qwen2"][0] == ids["qwen2"][1]
    assert ids["gpt-2"][0] != ids["gpt-2"][1]


def test_llama3_takes_whole_words_that_no_merge_reaches(tiny_llama, digit_tokenizer, convert, tmp_path):
    state = json.loads(digit_tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"]["qxz"] = len(state["model"]["vocab"])
    tokenizer = copy.deepcopy(digit_tokenizer)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    folder, _ = convert(tiny_llama[0], tokenizer, pre="llama-bpe", metadata={})
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.tokenize("qxz") == ["qxz"]
    assert tokenizer.tokenize("qxz") == ["q", "x", "z"]


@pytest.mark.parametrize(
    "pre, flag, starts_with_bos",
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_goes_in_front_where_the_file_says_so(converted_tokenizer, pre, flag, starts_with_bos):
    metadata = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = converted_tokenizer(pre=pre, metadata=metadata)
    assert (tokenizer("in").input_ids[0] == tokenizer.bos_token_id) == starts_with_bos
    assert tokenizer("in", add_special_tokens=False).input_ids[0] != tokenizer.bos_token_id


def test_every_control_token_is_special(converted_tokenizer):
    tokenizer = converted_tokenizer()
    assert set(tokenizer.all_special_ids) == {0, 1, 2, 3}
    assert tokenizer.convert_ids_to_tokens(tokenizer("a<repo_name>").input_ids) == ["a", "<repo_name>"]


def test_vocabulary_padding_is_no_token(tiny_llama, digit_tokenizer, convert):
    used = len(digit_tokenizer) - 7
    folder, facts = convert(tiny_llama[0], digit_tokenizer, unused=7)
    assert (facts["tokens"], facts["embedding_rows"]) == (used, 512)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == used
    assert "[PAD0]" not in tokenizer.get_vocab()
    assert tokenizer.decode(tokenizer("[PAD0] in 2024").input_ids) == "[PAD0] in 2024"


def test_template_special_tokens_and_length_are_kept(tiny, convert):
    model, tokenizer = tiny
    folder, _ = convert(model, tokenizer)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert set(loaded.all_special_ids) == {0, 1, 2}
    assert loaded.model_max_length == 512
    assert loaded.decode([1, 40, 2], skip_special_tokens=True) == loaded.decode([40])
    assert "A tiny title" not in (folder / "config.json").read_text()
    assert load(folder).generation_config.eos_token_id == 2


# refusals


def test_files_that_are_no_whole_gguf_are_refused(tiny_llama, tmp_path, write_gguf):
    whole = write_gguf(tmp_path / "whole.gguf", *tiny_llama).read_bytes()
    assert len(read_gguf(tmp_path / "whole.gguf")[1]) == 2 + 4 * 9 + 1
    broken = tmp_path / "broken.gguf"
    for content in (
        b"",
        b"GGUF",
        b"not a model" * 100,
        *(whole[: len(whole) * n // 20] for n in range(1, 20)),
        whole[:-32],
    ):
        broken.write_bytes(content)
        with pytest.raises(UserError, match="broken.gguf: not a whole GGUF file .* download it again"):
            convert_gguf(broken, tmp_path)
    with pytest.raises(UserError, match="absent.gguf: no such file"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path)


def test_parts_of_a_file_are_refused(tiny_llama, tmp_path, write_gguf):
    path = write_gguf(tmp_path / "a-00001-of-00003.gguf", *tiny_llama, metadata={"split.count": 3})
    with pytest.raises(UserError, match="must be a whole file, got one of 3 parts; join them with llama"):
        convert_gguf(path, tmp_path)


def test_queries_in_an_unknown_order_are_refused(tiny_llama, tmp_path, write_gguf, monkeypatch):
    monkeypatch.setattr(GGUFWriter, "add_head_count_kv", lambda *given: None)
    path = write_gguf(tmp_path / "old.gguf", *tiny_llama)
    with pytest.raises(UserError, match="attention.head_count_kv: must be in its metadata, got none; use"):
        convert_gguf(path, tmp_path)


def test_special_tokens_that_are_respelled_are_refused(tiny_llama, tmp_path, write_gguf):
    """transformers spells tokens beyond ASCII in GPT-2's byte alphabet, and then they are ordinary text."""
    model, tokenizer = tiny_llama
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    old, new = tokenizer.eos_token, "<｜end▁of▁sentence｜>"
    state["model"]["vocab"][new] = state["model"]["vocab"].pop(old)
    added = state["added_tokens"]
    state["added_tokens"] = [one | {"content": new} if one["content"] == old else one for one in added]
    state["post_processor"] = None
    names = {key: getattr(tokenizer, key) for key in ("bos_token", "eos_token", "pad_token")}
    names = {key: new if name == old else name for key, name in names.items()}
    renamed = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **names)
    renamed.chat_template = tokenizer.chat_template
    path = write_gguf(tmp_path / "deepseek.gguf", model, renamed)
    with pytest.raises(UserError, match="special token <｜end▁of▁sentence｜> must have id .*; use"):
        convert_gguf(path, tmp_path)


def test_unknown_pre_tokenizers_are_refused(tiny_llama, tmp_path, write_gguf):
    for pre in ("poro-chat", None):
        path = write_gguf(tmp_path / "other.gguf", *tiny_llama, pre=pre)
        with pytest.raises(UserError, match=f"other.gguf: token ids .* pre-tokenizer {pre!r}"):
            convert_gguf(path, tmp_path)


def test_a_missing_tensor_is_named(tiny_llama, tmp_path, write_gguf):
    path = write_gguf(tmp_path / "part.gguf", *tiny_llama, replace={"blk.1.ffn_up.weight": None})
    with pytest.raises(UserError, match="part.gguf: no weights for model.layers.1.mlp.up_proj.weight"):
        convert_gguf(path, tmp_path)


def test_unknown_architectures_are_refused(tiny_llama, tmp_path, write_gguf):
    path = write_gguf(tmp_path / "odd.gguf", *tiny_llama)
    path.write_bytes(path.read_bytes().replace(b"llama", b"lxama"))
    with pytest.raises(UserError, match="odd.gguf: .*lxama"):
        convert_gguf(path, tmp_path)


# SmolLM2 itself


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


# As llama.cpp has them: no BOS in front, each digit a token, and the space before a number one too.
SMOLLM2_IDS = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    " 2024": [216, 34, 32, 34, 36],
    "a 12 345": [81, 216, 33, 34, 216, 35, 36, 37],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "\n": [198],
}


@pytest.mark.parametrize("text", SMOLLM2_IDS)
def test_smollm2_token_ids(smollm2_tokenizer, text):
    assert smollm2_tokenizer(text).input_ids == SMOLLM2_IDS[text]
    assert smollm2_tokenizer.decode(SMOLLM2_IDS[text]) == text


def test_smollm2_template_and_special_tokens(smollm2_tokenizer):
    tokenizer = smollm2_tokenizer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert set(tokenizer.all_special_ids) == set(range(17))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_is_plain_bf16_and_tied(smollm2):
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config and config["tie_word_embeddings"]
    with safe_open(smollm2 / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert weights.get_tensor("model.embed_tokens.weight").dtype == torch.bfloat16
    assert "lm_head.weight" not in names and len(names) == 272
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.num_parameters() == 134_515_008
    assert all(parameter.requires_grad for parameter in model.parameters())


TEXT = (
    "The Amazon is the largest river in the world by the amount of water it carries. It begins high in the "
    "Andes mountains of Peru, only about a hundred miles from the Pacific Ocean, and flows east across the "
    "whole of South America until it reaches the Atlantic. More than a thousand smaller rivers join it on "
    "the way, and some of these are among the longest rivers on Earth themselves. During the rainy season "
    "the river rises by more than thirty feet and floods the forest on both sides for miles."
)


def test_smollm2_rope(smollm2, smollm2_tokenizer):
    """The stored rope fits the weights: the text is likely under it, and less so under the default one."""
    ids = smollm2_tokenizer(TEXT, return_tensors="pt").input_ids

    def loss(**rope) -> float:
        model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, **rope)
        with torch.no_grad():
            return model(ids, labels=ids).loss.item()

    assert loss() == pytest.approx(2.733, abs=0.01)
    assert loss(rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}) > 2.83
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 100_000.0, "rope_type": "default"}
