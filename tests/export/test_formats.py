"""Layouts of other tools: they predict what the drafter predicts, the way back is bit by bit, and what is
wrong with a folder is found."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.new import new_drafter
from drafttrain.export.formats import FORMATS, export_to, import_from, validate
from drafttrain.export.formats.layout import full_head
from drafttrain.run import cli
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError
from tests.conftest import tiny_model

KINDS = {"causal-lm": "vdm", "eagle": "eagle", "medusa": "medusa"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 20000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def save_target(folder: Path, model, tokenizer) -> FrozenTarget:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_target(str(folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def llama(tiny_llama, tmp_path_factory) -> FrozenTarget:
    return save_target(tmp_path_factory.mktemp("targets") / "llama", *tiny_llama)


@pytest.fixture(scope="module")
def qwen2(tiny_qwen2, tmp_path_factory) -> FrozenTarget:
    return save_target(tmp_path_factory.mktemp("targets") / "qwen2", *tiny_qwen2)


@pytest.fixture(scope="module")
def qwen3(tiny_llama, tmp_path_factory) -> FrozenTarget:
    tokenizer = tiny_llama[1]
    model = tiny_model(Qwen3Config, Qwen3ForCausalLM, tokenizer)
    return save_target(tmp_path_factory.mktemp("targets") / "qwen3", model, tokenizer)


def make(folder: Path, target: FrozenTarget, kind: str, vocabulary: int = 300, **settings) -> Path:
    """The folder of a random fp32 drafter with large weights over the last tokens of the target's."""
    config = DrafterConfig(kind=kind, **settings)
    ids = torch.arange(target.vocab_size - vocabulary, target.vocab_size)
    drafter = new_drafter(target, config, ids)
    frozen = {f"{name}" for name in drafter._keys_to_ignore_on_save}
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name not in frozen:  # 1 and 0 in norms and biases would hide that they are lost
                parameter += torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1)
    drafter.save_pretrained(folder)
    return folder


def eagle(folder: Path, target: FrozenTarget, **settings) -> Path:
    return make(folder, target, "eagle", **{"train_head": False, **settings})


def says(folder: Path, target: FrozenTarget, ids: torch.Tensor, steps: int = 1) -> torch.Tensor:
    """Return the predictions of a drafter in its own format after a text [n] and after its own next
    `steps` - 1 tokens: log-probabilities [steps, D]."""
    drafter = load_drafter(folder, target)
    state = drafter.new_state(1, 64)
    tapped = target.encode(ids[None, :-1], torch.zeros_like(ids[None, :-1])).tapped
    drafter.update(state, ids[None, :-1], tapped, torch.tensor([len(ids) - 1]))
    tree, found = TokenTree.root_only(ids[-1:]), []
    for depth in range(steps):
        last = torch.tensor([[depth]])
        found.append(drafter.expand(state, tree, last)[0, 0])
        best = found[-1].argmax()
        tree = tree.append(last, drafter.to_target(best)[None, None], found[-1][best][None, None])
    return torch.stack(found)


TEXT = torch.tensor([5, 301, 44, 7, 480, 12, 99, 3])


# what is written predicts what the drafter predicts


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train_head": False},
        {"train_embeddings": True},
        {"vocabulary": 512},
        {"kv_heads": 1},
        {"kv_heads": 4},
        {"intermediate_size": 40},
    ],
    ids=[
        "trained head",
        "frozen head",
        "trained embeddings",
        "all tokens",
        "1 kv head",
        "4 kv heads",
        "narrow",
    ],
)
def test_causal_lm_gives_our_logits(family, settings, request, tmp_path):
    target = request.getfixturevalue(family)
    folder = make(tmp_path / "vdm", target, "vdm", **settings)
    export_to("causal-lm", folder, tmp_path / "out", target, dtype=None)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == type(target.model).__name__
    ids = load_file(folder / "model.safetensors")["draft_to_target"]
    logits = model(TEXT[None]).logits[0, -1]
    ours = says(folder, target, TEXT)[0]
    torch.testing.assert_close(logits[ids].log_softmax(-1), ours, atol=2e-5, rtol=1e-5)
    assert logits.argmax() in ids
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("Why is it?").input_ids == target.tokenizer("Why is it?").input_ids
    assert tokenizer.chat_template == target.tokenizer.chat_template


def test_tokens_outside_the_draft_vocabulary_never_win():
    rows, ids = torch.randn(20, 16), torch.arange(5, 25)
    for state in (torch.randn(16), -10 * rows.mean(0), rows[3]):
        logits = full_head(rows - 10 * state / state.norm(), ids, 40) @ state
        assert logits[ids].max() < 0  # rows of zeros would win
        assert logits.argmax() in ids


@pytest.mark.parametrize("kv_heads", [None, 1, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_eagle_is_one_llama_layer_on_joined_inputs(family, kv_heads, request, tmp_path):
    """Against transformers' own layer, fed as EAGLE's paper says: embedding of token j beside the state at
    j - 1, or beside the layer's own output where the target has computed none."""
    target = request.getfixturevalue(family)
    folder = eagle(tmp_path / "eagle", target, vocabulary=512, kv_heads=kv_heads)
    export_to("eagle", folder, tmp_path / "out", target, dtype=None)
    fields = json.loads((tmp_path / "out/config.json").read_text())
    tensors = load_file(tmp_path / "out/model.safetensors")
    config = LlamaConfig(**{k: v for k, v in fields.items() if k not in ("drafttrain", "architectures")})
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = torch.nn.Identity()
    prefix = "layers.0."
    weights = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    for name in ("q_proj", "k_proj", "v_proj"):
        if f"self_attn.{name}.bias" in weights:
            bias = torch.nn.Parameter(torch.empty_like(weights[f"self_attn.{name}.bias"]))
            getattr(layer.self_attn, name).bias = bias
    layer.load_state_dict(weights)
    ours = says(folder, target, TEXT, steps=3)  # which taps the states
    states = list(target.encode(TEXT[None, :-1], torch.zeros_like(TEXT[None, :-1])).tapped[0])
    tokens, found = TEXT.tolist(), []
    for _ in range(3):
        embedded = tensors["embed_tokens.weight"][tokens[1:]]
        x = torch.cat((embedded, torch.stack(states)), -1) @ tensors["fc.weight"].T
        positions = torch.arange(len(x))[None]
        rotary = LlamaRotaryEmbedding(config)(x[None], positions)
        mask = torch.full((len(x), len(x)), -1e9).triu(1)[None, None]
        out = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        state = (out[0] if isinstance(out, tuple) else out)[0, -1]
        found.append(target.head(state).log_softmax(-1))
        states.append(state)
        tokens.append(found[-1].argmax().item())
    torch.testing.assert_close(torch.stack(found), ours, atol=5e-5, rtol=1e-4)


def test_medusa_heads_give_our_logits(llama, tmp_path):
    folder = make(tmp_path / "heads", llama, "medusa", heads=3)
    export_to("medusa", folder, tmp_path / "out", llama, dtype=None)
    tensors = load_file(tmp_path / "out/model.safetensors")
    ours = says(folder, llama, TEXT, steps=3)
    state = llama.encode(TEXT[None, :-1], torch.zeros_like(TEXT[None, :-1])).tapped[0, -1]
    ids = load_file(folder / "model.safetensors")["draft_to_target"]
    names = ("blocks.{}.layers.0.weight", "blocks.{}.layers.0.bias", "lm_heads.{}.weight")
    for i in range(3):
        weight, bias, head = (tensors[name.format(i)] for name in names)
        logits = head @ (state + torch.nn.functional.silu(weight @ state + bias))
        assert len(logits) == 512 and logits.argmax() == ids[ours[i].argmax()]
        torch.testing.assert_close(logits[ids].log_softmax(-1), ours[i], atol=2e-5, rtol=1e-5)


def test_assisted_generation_gives_the_greedy_output(llama, tmp_path):
    export_to("causal-lm", make(tmp_path / "vdm", llama, "vdm"), tmp_path / "out", llama, dtype=None)
    small = make(tmp_path / "lm", llama, "causal_lm", model=llama.model.name_or_path, vocabulary=512)
    export_to("causal-lm", small, tmp_path / "small", llama, dtype=None)
    model = AutoModelForCausalLM.from_pretrained(llama.model.name_or_path, dtype=torch.float32)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    for start in range(4):
        prompt = TEXT[start:][None]
        plain = model.generate(prompt, **options)
        assert len(set(plain[0].tolist())) > 5
        for name in ("out", "small"):
            assistant = AutoModelForCausalLM.from_pretrained(tmp_path / name)
            assisted = model.generate(prompt, assistant_model=assistant, **options)
            assert torch.equal(assisted, plain)


# the way back


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("vocabulary", [200, 512])
def test_the_way_back_is_exact(format, family, vocabulary, request, tmp_path):
    target = request.getfixturevalue(family)
    settings = {"train_head": False, "train_embeddings": True} if format == "eagle" else {}
    folder = make(tmp_path / "own", target, KINDS[format], vocabulary, **settings)
    written = export_to(format, folder, tmp_path / "out", target, dtype=None)
    validate(format, tmp_path / "out")
    import_from(format, tmp_path / "out", tmp_path / "back")
    config, again = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "back"))
    assert config == again
    ours, back = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "back"))
    assert ours.keys() == back.keys()
    assert all(torch.equal(ours[name], back[name]) and ours[name].dtype == back[name].dtype for name in ours)
    assert bool(written.notes) == (vocabulary == 200)
    load_drafter(tmp_path / "back", target)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("format", ["causal-lm", "eagle"])
def test_heads_of_keys_and_values_come_back(format, kv_heads, qwen2, tmp_path):
    """Others than the target's, which has 2."""
    settings = {"train_head": False} if format == "eagle" else {}
    folder = make(tmp_path / "own", qwen2, KINDS[format], kv_heads=kv_heads, **settings)
    written = export_to(format, folder, tmp_path / "out", qwen2, dtype=None)
    assert written.config["num_key_value_heads"] == kv_heads
    validate(format, tmp_path / "out")
    import_from(format, tmp_path / "out", tmp_path / "back")
    config, again = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "back"))
    assert config == again and again["num_key_value_heads"] == kv_heads
    ours, back = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "back"))
    assert ours.keys() == back.keys() and all(torch.equal(ours[name], back[name]) for name in ours)
    assert torch.equal(says(folder, qwen2, TEXT, 2), says(tmp_path / "back", qwen2, TEXT, 2))


def test_a_small_lm_comes_back(llama, tmp_path):
    folder = make(tmp_path / "lm", llama, "causal_lm", model=llama.model.name_or_path)
    notes = export_to("causal-lm", folder, tmp_path / "out", llama, dtype=None).notes
    assert "drafts over 512 tokens, here over 300" in notes[0]
    import_from("causal-lm", tmp_path / "out", tmp_path / "back")
    ours, back = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "back"))
    assert ours.keys() == back.keys() and all(torch.equal(ours[name], back[name]) for name in ours)


def test_null_is_kept_where_it_is_not_the_default(llama, tmp_path):
    """Mistral's window is 4096 tokens unless it is null; and a class is named where the LM names none."""
    config = MistralConfig(
        **dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=1),
        **dict(
            num_attention_heads=4, num_key_value_heads=2, sliding_window=None, max_position_embeddings=512
        ),
    )
    MistralForCausalLM(config).save_pretrained(tmp_path / "mistral")
    llama.tokenizer.save_pretrained(tmp_path / "mistral")
    stored = json.loads((tmp_path / "mistral" / "config.json").read_text())
    del stored["architectures"]
    (tmp_path / "mistral" / "config.json").write_text(json.dumps(stored))
    folder = make(tmp_path / "lm", llama, "causal_lm", model=str(tmp_path / "mistral"))
    export_to("causal-lm", folder, tmp_path / "out", llama)
    exported = AutoConfig.from_pretrained(tmp_path / "out")
    assert exported.sliding_window is None and exported.architectures == ["MistralForCausalLM"]


def test_a_small_lm_with_a_tied_head_comes_back(tiny_llama, llama, tmp_path):
    """Its head is no tensor of its own, as SmolLM2's and Qwen2.5's."""
    model, tokenizer = tiny_llama
    tied = type(model)(LlamaConfig(**{**model.config.to_dict(), "tie_word_embeddings": True}))
    save_target(tmp_path / "tied", tied, tokenizer)
    folder = make(tmp_path / "lm", llama, "causal_lm", model=str(tmp_path / "tied"))
    ours = load_file(folder / "model.safetensors")
    assert "lm.lm_head.weight" not in ours
    export_to("causal-lm", folder, tmp_path / "out", llama, dtype=None)
    import_from("causal-lm", tmp_path / "out", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert ours.keys() == back.keys() and all(torch.equal(ours[name], back[name]) for name in ours)


def test_a_small_lm_of_another_size_is_an_error(tiny_llama, llama, tmp_path):
    """Neither transformers nor vLLM take the pair by default."""
    model, tokenizer = tiny_llama
    larger = type(model)(LlamaConfig(**{**model.config.to_dict(), "vocab_size": 520}))
    save_target(tmp_path / "larger", larger, tokenizer)
    folder = make(tmp_path / "lm", llama, "causal_lm", model=str(tmp_path / "larger"))
    notes = export_to("causal-lm", folder, tmp_path / "out", llama).notes
    assert len(notes) == 2 and "it has 520 tokens and the target 512: transformers needs" in notes[1]
    import_from("causal-lm", tmp_path / "out", tmp_path / "back")
    assert len(load_file(tmp_path / "back/model.safetensors")["lm.lm_head.weight"]) == 520


def test_weights_become_bf16_by_default(llama, tmp_path):
    export_to("eagle", eagle(tmp_path / "own", llama), tmp_path / "out", llama)
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(UserError, match="dtype: must be one of bfloat16, float16, float32, got int8"):
        export_to("eagle", tmp_path / "own", tmp_path / "out", llama, dtype="int8")


def test_rope_fields_survive(tiny_llama, tmp_path):
    model, tokenizer = tiny_llama
    config = LlamaConfig(**{**model.config.to_dict(), "rope_parameters": LLAMA3})
    other = type(model)(config)
    other.load_state_dict(model.state_dict())
    target = save_target(tmp_path / "target", other, tokenizer)
    for format, folder in (
        ("eagle", eagle(tmp_path / "eagle", target)),
        ("causal-lm", make(tmp_path / "vdm", target, "vdm")),
        ("causal-lm", make(tmp_path / "lm", target, "causal_lm", model=target.model.name_or_path)),
    ):
        notes = export_to(format, folder, tmp_path / "out", target, dtype=None).notes
        warned = any("EAGLE's own code cannot express rope scaling of type llama3" in note for note in notes)
        assert warned == (format == "eagle")
        validate(format, tmp_path / "out")
        fields = json.loads((tmp_path / "out/config.json").read_text())
        assert fields["rope_theta"] == 20000.0 and fields["rope_scaling"]["rope_type"] == "llama3"
        read = AutoConfig.from_pretrained(tmp_path / "out").rope_parameters
        assert {key: read[key] for key in LLAMA3} == LLAMA3
        for keys in (("rope_parameters",), ("rope_theta", "rope_scaling")):  # each place alone is enough
            part = {key: value for key, value in fields.items() if key in keys or not key.startswith("rope")}
            read = LlamaConfig(**part).rope_parameters
            assert {key: read[key] for key in LLAMA3} == LLAMA3
        ids = load_file(folder / "model.safetensors")["draft_to_target"]
        if format == "causal-lm":
            logits = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(TEXT[None]).logits[0, -1, ids]
            ours = says(folder, target, TEXT)[0]
            torch.testing.assert_close(logits.log_softmax(-1), ours, atol=2e-5, rtol=1e-5)


def test_a_tied_target_without_anything_trained_stays_tied(tiny_llama, tmp_path):
    model, tokenizer = tiny_llama
    config = LlamaConfig(**{**model.config.to_dict(), "tie_word_embeddings": True})
    target = save_target(tmp_path / "target", type(model)(config), tokenizer)
    folder = make(tmp_path / "vdm", target, "vdm", 512, train_head=False)
    export_to("causal-lm", folder, tmp_path / "out", target, dtype=None)
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(TEXT[None]).logits[0, -1]
    torch.testing.assert_close(logits.log_softmax(-1), says(folder, target, TEXT)[0], atol=2e-5, rtol=1e-5)


# what is wrong is found


@pytest.fixture(scope="module")
def written(llama, tmp_path_factory) -> Path:
    """A right folder of each format."""
    place = tmp_path_factory.mktemp("written")
    torch.manual_seed(0)
    for format, kind in KINDS.items():
        settings = {"heads": 2} if kind == "medusa" else {}
        own = eagle(place / "own", llama) if kind == "eagle" else make(place / "own", llama, kind, **settings)
        export_to(format, own, place / format, llama)
    return place


EAGLE_TENSORS = {
    "embed_tokens.weight",
    "fc.weight",
    *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "layers.0.post_attention_layernorm.weight",
}


def test_eagle_holds_what_eagle_1_holds(written):
    tensors = load_file(written / "eagle/model.safetensors")
    assert tensors.keys() == EAGLE_TENSORS
    fields = json.loads((written / "eagle/config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLM"] and fields["num_hidden_layers"] == 1
    assert fields["bias"] is False and None not in fields.values()


# What SafeAILab/EAGLE's eagle/train/*.json say beside sizes, and the heads of keys and values.
AS_PUBLISHED = {
    "vicuna": ({"tie_word_embeddings": False, "transformers_version": "4.28.1"}, 4),
    "llama-2": ({"num_key_value_heads": 4, "pretraining_tp": 1, "rope_scaling": None}, 4),
    "llama-3": ({"num_key_value_heads": 2, "rope_theta": 500000.0, "bias": False, "pad_token_id": 0}, 2),
}


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_eagle_of_others_is_right_too(name, llama, tmp_path):
    """Few fields, fp16, and a bias on fc unless the config says that there is none."""
    extra, kv_heads = AS_PUBLISHED[name]
    export_to("eagle", eagle(tmp_path / "own", llama, kv_heads=kv_heads), tmp_path / "eagle", llama)
    fields = json.loads((tmp_path / "eagle/config.json").read_text())
    names = ("architectures", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings")
    names += ("model_type", "num_attention_heads", "num_hidden_layers", "rms_norm_eps", "vocab_size")
    few = {name: fields[name] for name in names} | {"use_cache": True, "torch_dtype": "float16"}
    (tmp_path / "eagle/config.json").write_text(json.dumps(few | {"initializer_range": 0.02} | extra))
    tensors = load_file(tmp_path / "eagle/model.safetensors")
    tensors |= {} if "bias" in extra else {"fc.bias": torch.zeros(64)}
    tensors = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "eagle/model.safetensors")
    validate("eagle", tmp_path / "eagle")
    with pytest.raises(UserError, match="no key drafttrain, which names target and draft vocabulary"):
        import_from("eagle", tmp_path / "eagle", tmp_path / "back")


def change_config(folder: Path, **changes) -> None:
    fields = json.loads((folder / "config.json").read_text()) | changes
    fields = {key: value for key, value in fields.items() if value != "gone"}
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("format", FORMATS)
def test_every_required_key_is_required(format, written, tmp_path):
    fields = json.loads((written / format / "config.json").read_text())
    required = {key for key in fields if _breaks(format, written, tmp_path, key)}
    named = {
        "causal-lm": {"architectures", "vocab_size", "head_dim", "rope_theta", "tie_word_embeddings"},
        "eagle": {"architectures", "vocab_size", "hidden_size", "rms_norm_eps", "rope_theta", "bias"},
        "medusa": {"architectures", "num_heads", "truncated_vocab_size", "medusa_fc_bias"},
    }[format]
    assert named <= required and "drafttrain" not in required


def _breaks(format: str, written: Path, tmp_path: Path, key: str) -> bool:
    folder = tmp_path / f"without {key}"
    shutil.copytree(written / format, folder)
    change_config(folder, **{key: "gone"})
    try:
        validate(format, folder)
    except UserError as error:
        assert f"config.json lacks {key}" in str(error) or "rope" in key
        return True
    return False


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layer_count": 1}, "has layer_count, which no reader knows"),
        ({"vocab_size": None}, "vocab_size is null"),
        ({"hidden_size": "64"}, "hidden_size is '64', not int"),
        ({"hidden_size": True}, "hidden_size is True, not int"),
    ],
)
def test_wrong_configs_are_found(format, changes, message, written, tmp_path):
    shutil.copytree(written / format, tmp_path / "wrong")
    change_config(tmp_path / "wrong", **changes)
    with pytest.raises(UserError, match=message):
        validate(format, tmp_path / "wrong")


@pytest.mark.parametrize(
    "format, changes, message",
    [
        ("eagle", {"rope_theta": 1.0}, "rope_theta is not that of rope_parameters"),
        ("causal-lm", {"rope_theta": 1.0}, "rope_theta is not that of rope_parameters"),
        ("eagle", {"rope_parameters": LLAMA3, "rope_theta": 20000.0}, "rope_scaling is not that"),
        ("eagle", {"num_hidden_layers": 2}, "num_hidden_layers is 2, not 1"),
        ("eagle", {"bias": True}, "no tensor fc.bias"),
        ("eagle", {"num_key_value_heads": 4}, r"k_proj.weight is \[32, 64\], not \[64, 64\]"),
        ("eagle", {"num_key_value_heads": 3}, "num_attention_heads is 4, no multiple of .*heads .3."),
        ("eagle", {"num_attention_heads": 0}, "num_attention_heads is 0, not above 0"),
        ("eagle", {"num_attention_heads": 6, "head_dim": "gone"}, "no multiple of num_attention_heads .6."),
        ("eagle", {"architectures": ["GPT2LMHeadModel"]}, "architectures are not llama and"),
        ("eagle", {"model_type": "qwen2"}, "architectures are not llama and"),
        ("eagle", {"torch_dtype": "float32"}, "torch_dtype is float32, and the tensors are bfloat16"),
        ("causal-lm", {"dtype": "float32"}, "dtype is float32, and the tensors are bfloat16"),
        ("causal-lm", {"num_key_value_heads": 0}, "num_key_value_heads is 0, not above 0"),
        ("causal-lm", {"drafttrain": "x"}, "drafttrain is 'x', not dict"),
        ("causal-lm", {"model_type": "gpt2"}, "model_type is gpt2"),
        ("causal-lm", {"architectures": ["Qwen2ForCausalLM"]}, "architectures is not"),
        ("causal-lm", {"num_hidden_layers": 2}, "no tensor model.layers.1"),
        ("medusa", {"num_heads": 3}, "no tensor blocks.2"),
        ("medusa", {"medusa_fc_bias": False}, "unexpected tensor blocks.0.layers.0.bias"),
        ("medusa", {"truncated_vocab_size": 300}, "truncated_vocab_size equal to vocab_size"),
        ("medusa", {"dtype": "float32"}, "dtype is float32, and the tensors are bfloat16"),
    ],
)
def test_configs_that_do_not_fit_are_found(format, changes, message, written, tmp_path):
    shutil.copytree(written / format, tmp_path / "wrong")
    change_config(tmp_path / "wrong", **changes)
    with pytest.raises(UserError, match=message):
        validate(format, tmp_path / "wrong")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gone"}, "transformers makes no causal LM of it"),
        ({"model_type": "no such"}, "transformers makes no causal LM of it .Unrecognized model"),
        ({"num_attention_heads": 0}, "transformers makes no causal LM of it"),
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures is not \[LlamaForCausalLM\]"),
        ({"rope_theta": 1.0}, "rope_theta is not that of rope_parameters"),
        ({"dtype": "float32"}, "dtype is float32, and the tensors are bfloat16"),
        ({"num_hidden_layers": 5}, "no tensor model.layers.4"),
    ],
)
def test_wrong_small_lms_are_found(changes, message, llama, tmp_path):
    folder = make(tmp_path / "lm", llama, "causal_lm", model=llama.model.name_or_path)
    export_to("causal-lm", folder, tmp_path / "out", llama)
    change_config(tmp_path / "out", **changes)
    with pytest.raises(UserError, match=message):
        validate("causal-lm", tmp_path / "out")


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict.fromkeys(("target_vocab_size", "draft_ids")), "config.json lacks target_vocab_size"),
        ({"model_type": "drafttrain_medusa", "heads": 2}, "vdm or causal_lm for causal-lm, got medusa"),
        ({"model_type": "llama"}, "for causal-lm, got llama; no other engine"),
        ({"draft_ids": "all"}, "draft_ids must be a list of token ids"),
        ({"draft_ids": [9999] * 300}, "must be 300 different tokens of 512"),
        ({"draft_ids": [1, 2]}, "must be 300 different tokens of 512"),
        ({"draft_vocab_size": 512}, "lm_head.weight|must be 512 different tokens of 512"),
        ({"hidden_size": 32}, r"embed_tokens|is \[.*64\], not \[.*32\]"),
    ],
)
def test_what_cannot_be_read_back_is_an_error(changes, message, written, tmp_path):
    """The folder itself is right: others do not read what is wrong with it."""
    shutil.copytree(written / "causal-lm", tmp_path / "out")
    own = json.loads((tmp_path / "out/config.json").read_text())["drafttrain"] | changes
    own = {key: value for key, value in own.items() if value is not None}
    change_config(tmp_path / "out", drafttrain=own)
    validate("causal-lm", tmp_path / "out")
    with pytest.raises(UserError, match=message):
        import_from("causal-lm", tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "type", "nan"])
def test_wrong_tensors_are_found(format, damage, written, tmp_path):
    shutil.copytree(written / format, tmp_path / "wrong")
    file = tmp_path / "wrong/model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    message = {
        "missing": f"no tensor {name}",
        "extra": "unexpected tensor d2t",
        "shape": f"{name} is ",
        "type": f"{name} is int64",
        "nan": f"{name} holds numbers that are not finite",
    }[damage]
    if damage == "missing":
        del tensors[name]
    elif damage == "extra":
        tensors["d2t"] = torch.zeros(3)
    elif damage == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    elif damage == "type":
        tensors[name] = tensors[name].long()
    else:
        tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(UserError, match=message):
        validate(format, tmp_path / "wrong")


@pytest.mark.parametrize(
    "name, message",
    [
        ("lm_head.weight", "unexpected tensor lm_head.weight"),
        ("layers.0.input_layernorm.weight", "unexpected tensor layers.0.input_layernorm.weight"),
        ("norm.weight", "unexpected tensor norm.weight"),
    ],
)
def test_eagle_has_no_head_and_no_further_norms(name, message, written, tmp_path):
    shutil.copytree(written / "eagle", tmp_path / "wrong")
    file = tmp_path / "wrong/model.safetensors"
    save_file(load_file(file) | {name: torch.ones(64, dtype=torch.bfloat16)}, file)
    with pytest.raises(UserError, match=message):
        validate("eagle", tmp_path / "wrong")


def test_layers_that_are_off_by_one_are_found(written, tmp_path):
    shutil.copytree(written / "eagle", tmp_path / "wrong")
    file = tmp_path / "wrong/model.safetensors"
    save_file({n.replace("layers.0", "layers.1"): t for n, t in load_file(file).items()}, file)
    with pytest.raises(UserError, match="no tensor layers.0.self_attn.q_proj.weight"):
        validate("eagle", tmp_path / "wrong")


# what cannot be expressed is refused


@pytest.mark.parametrize(
    "format, kind, settings, message",
    [
        ("eagle", "eagle", {}, "drafter.train_head: must be false for EAGLE-1, got true; train again"),
        ("eagle", "eagle", {"train_head": False, "input_norms": True}, "drafter.input_norms: must be false"),
        (
            "eagle",
            "vdm",
            {},
            "must be a drafter of kind eagle for eagle, got vdm; export it to causal-lm",
        ),
        ("causal-lm", "medusa", {}, "for causal-lm, got medusa; export it to medusa"),
        ("eagle", "edd", {}, "no other engine gives such drafters what they read"),
        ("gguf", "vdm", {}, "--to: must be one of causal-lm, eagle, medusa, card, got gguf"),
    ],
)
def test_refusals_are_one_line(format, kind, settings, message, llama, tmp_path, capsys):
    folder = make(tmp_path / "own", llama, kind, **settings)
    capsys.readouterr()
    words = ["export", str(folder), "--to", format, "--out", str(tmp_path / "out")]
    assert cli.main(words) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and message in printed
    assert not (tmp_path / "out").exists()


def test_a_layer_from_a_block_with_norms_is_no_eagle_1(qwen3, tmp_path):
    folder = eagle(tmp_path / "own", qwen3, init=-1)
    with pytest.raises(UserError, match="one plain Llama layer for EAGLE-1, got qk_norm; .*init: random"):
        export_to("eagle", folder, tmp_path / "out", qwen3)


@pytest.mark.parametrize("damage", ["nan", "missing", "ids"])
def test_a_damaged_drafter_is_refused(damage, llama, tmp_path):
    folder = eagle(tmp_path / "own", llama)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if damage == "nan":
        tensors["fc.weight"][0, 0] = torch.nan
    elif damage == "missing":
        del tensors["layers.0.k_proj.weight"]
    else:
        tensors["draft_to_target"][0] = tensors["draft_to_target"][1]
    save_file(tensors, file)
    message = {"nan": "fc.weight holds", "missing": "no tensor layers.0.k_proj", "ids": "different tokens"}
    with pytest.raises(UserError, match=message[damage]):
        export_to("eagle", folder, tmp_path / "out", llama)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["hidden_size", "train_head", "rope_parameters", "draft_vocab_size"])
def test_a_config_that_lacks_something_is_refused(key, llama, tmp_path):
    folder = make(tmp_path / "vdm", llama, "vdm")
    change_config(folder, **{key: "gone"})
    with pytest.raises(UserError, match=f"not whole: config.json lacks {key}"):
        export_to("causal-lm", folder, tmp_path / "out", llama)


def test_a_config_from_before_int8_heads_is_whole(llama, tmp_path):
    folder = make(tmp_path / "vdm", llama, "vdm")
    export_to("causal-lm", folder, tmp_path / "whole", llama)
    change_config(folder, head_dtype="gone")
    export_to("causal-lm", folder, tmp_path / "out", llama)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("ids", [None, torch.arange(5)], ids=["none", "too few"])
def test_a_small_lm_without_its_draft_vocabulary_is_refused(ids, llama, tmp_path):
    folder = make(tmp_path / "lm", llama, "causal_lm", model=llama.model.name_or_path)
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != "draft_to_target"}
    save_file(tensors | ({} if ids is None else {"draft_to_target": ids}), file)
    with pytest.raises(UserError, match="draft_to_target"):
        export_to("causal-lm", folder, tmp_path / "out", llama)


@pytest.mark.parametrize("kind", ["vdm", "causal_lm"])
def test_another_target_is_refused(kind, llama, smollm2, tmp_path):
    model = {"model": llama.model.name_or_path} if kind == "causal_lm" else {}
    folder = make(tmp_path / "own", llama, kind, **model)
    with pytest.raises(UserError, match="smollm2-135m-instruct: hidden_size must be 64, .*, got 576"):
        export_to("causal-lm", folder, tmp_path / "out", str(smollm2))


def test_a_target_of_another_tokenizer_is_refused(llama, tiny_llama, tmp_path):
    """Its ids mean other words, even if its shape fits."""
    model, tokenizer = tiny_llama
    folder = make(tmp_path / "vdm", llama, "vdm")
    model.save_pretrained(tmp_path / "other")
    text = json.loads(tokenizer.backend_tokenizer.to_str())
    text["model"]["merges"] = text["model"]["merges"][:100]
    tokenizer.save_pretrained(tmp_path / "other")
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(UserError, match="its tokenizer must read"):
        export_to("causal-lm", folder, tmp_path / "out", str(tmp_path / "other"))


def test_a_vocabulary_of_another_size_than_the_targets_is_refused(llama, tmp_path):
    folder = make(tmp_path / "vdm", llama, "vdm")
    change_config(folder, target_vocab_size=600)
    with pytest.raises(UserError, match=r"embed_tokens.weight is \[512, 64\], not \[600, 64\]"):
        export_to("causal-lm", folder, tmp_path / "out", llama)


def test_nothing_is_replaced_but_an_export(llama, tmp_path):
    folder = eagle(tmp_path / "own", llama)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.json").write_text("{}")
    for place in (folder, tmp_path / "data", tmp_path):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UserError, match="holds something else than an export"):
            export_to("eagle", folder, place)
        assert sorted(tmp_path.rglob("*")) == before
    for _ in range(2):
        export_to("eagle", folder, tmp_path / "out")
    (tmp_path / "out" / "notes.md").write_text("mine")
    with pytest.raises(UserError, match="holds something else than an export"):
        export_to("eagle", folder, tmp_path / "out")
    assert (tmp_path / "out" / "notes.md").read_text() == "mine"
    # an export that was loaded, trained and saved again: its config is still ours, its weights are not
    shutil.copytree(tmp_path / "out", tmp_path / "tuned")
    for name in (".files.json", "notes.md"):
        (tmp_path / "tuned" / name).unlink()
    with pytest.raises(UserError, match="holds something else than an export"):
        export_to("eagle", folder, tmp_path / "tuned")


def test_an_import_replaces_nothing(llama, tmp_path):
    folder = eagle(tmp_path / "own", llama)
    export_to("eagle", folder, tmp_path / "out")
    (tmp_path / "file").write_text("x")
    for place in (folder, tmp_path / "out", tmp_path / "file"):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UserError, match="holds something already; name a new folder for the drafter"):
            import_from("eagle", tmp_path / "out", place)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (tmp_path / "back").mkdir()
    import_from("eagle", tmp_path / "out", tmp_path / "back")
    assert load_file(tmp_path / "back/model.safetensors").keys()


def test_commands(llama, tmp_path, capsys):
    folder = eagle(tmp_path / "own", llama)
    assert cli.main(["export", str(folder), "--to", "eagle", "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'out'}\n" and "drafts over 512 tokens, here over 300" in err
    assert '{"method": "eagle", "model": ' in err
    assert cli.main(["export", str(tmp_path / "out"), "--check", "eagle"]) == 0
    words = ["export", str(tmp_path / "out"), "--from", "eagle", "--out", str(tmp_path / "back")]
    assert cli.main(words) == 0
    change_config(tmp_path / "out", vocab_size=None)
    assert cli.main(["export", str(tmp_path / "out"), "--check", "eagle"]) == 2
    assert "vocab_size is null" in capsys.readouterr().err
