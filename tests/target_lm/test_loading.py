"""Loading a target by each kind of name, and one line for everything that can be wrong with it."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from drafttrain.kernels import dtype
from drafttrain.target_lm import loading
from drafttrain.target_lm.fetch import fetch_target
from drafttrain.target_lm.known import SMOLLM2, is_known
from drafttrain.target_lm.loading import (
    choose_dtype,
    load_for_decoding,
    load_target,
    load_tokenizer,
    resolve_target,
)
from drafttrain.utils.errors import UserError


@pytest.fixture(params=["llama", "qwen2"])
def tiny(request, tiny_llama, tiny_qwen2):
    return {"llama": tiny_llama, "qwen2": tiny_qwen2}[request.param]


@pytest.fixture
def folder(tiny_llama, tmp_path):
    """A whole target in a folder."""
    for part in tiny_llama:
        part.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def edit_json(path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_loads_as_it_was_saved(tiny, tmp_path):
    model, tokenizer = tiny
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    target = load_target(str(tmp_path / "target"), dtype="float32", device="cpu")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(target.model(ids).logits, model(ids).logits)
    assert target.tokenizer("The quick brown fox").input_ids == tokenizer("The quick brown fox").input_ids
    assert target.name == str(tmp_path / "target")
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_dtype(folder):
    assert load_target(str(folder), device="cpu").dtype == torch.bfloat16  # the faster one: see conftest
    assert load_target(str(folder), dtype="auto", device="cpu").dtype == torch.bfloat16
    assert load_target(str(folder), dtype="float32", device="cpu").dtype == torch.float32
    assert load_target(str(folder), dtype=torch.float32, device="cpu").dtype == torch.float32
    assert load_target(str(folder), dtype="stored", device="cpu").dtype == torch.float32
    with pytest.raises(UserError, match="dtype: must be one of auto, bfloat16, float32, float16, got int4; "):
        load_target(str(folder), dtype="int4")
    with pytest.raises(UserError, match="dtype: must be bfloat16 or float32 on a CPU, got float16"):
        load_target(str(folder), dtype="float16", device="cpu")


def test_auto_is_for_a_kind_of_work(folder, monkeypatch):
    """Fast for many rows in bf16, for a few in fp32; sizes are those of the config."""
    asked = []

    def timed(hidden, intermediate, threads=None):
        asked.append((hidden, intermediate))
        ms = {"float32": {1: 1.0, 16: 1.0, 128: 9.0}, "bfloat16": {1: 2.0, 16: 2.0, 128: 3.0}}
        return dtype.Timings(ms)

    monkeypatch.setattr(dtype, "timed", timed)
    assert load_target(str(folder), device="cpu").dtype == torch.bfloat16
    assert load_for_decoding(str(folder), device="cpu").dtype == torch.float32
    assert choose_dtype(str(folder), "auto", "cpu", "decoding") == torch.float32
    assert set(asked) == {(64, 128)}


def test_an_internal_dtype_is_not_questioned(folder, monkeypatch, capsys):
    def timed(*sizes):
        raise AssertionError

    monkeypatch.setattr(dtype, "timed", timed)
    load_target(str(folder), dtype=torch.float32, device="cpu")
    assert "dtype" not in capsys.readouterr().err


def test_device(folder):
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert load_target(str(folder)).device.type == kind
    for device in ("gpu", "cuda:77"):
        with pytest.raises(UserError, match=f"device: '{device}' cannot be used"):
            load_target(str(folder), device=device)


def test_a_gguf_file_and_the_folder_made_from_it(tiny, tmp_path, write_gguf, monkeypatch):
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "tiny.gguf", *tiny)
    by_file, by_folder = load_target(str(path)), load_target(str(fetch_target(path)))
    assert by_file.name == by_folder.name == "tiny.gguf"
    assert torch.equal(by_file.lm_head.weight, by_folder.lm_head.weight)
    assert load_tokenizer(str(path)).chat_template == tiny[1].chat_template


def test_smollm2_by_name(smollm2):
    assert resolve_target("SmolLM2-135M-Instruct") == str(smollm2)
    target = load_target("smollm2-135m-instruct", device="cpu")
    assert (target.name, target.dtype, target.n_blocks) == ("smollm2-135m-instruct", torch.bfloat16, 30)
    prompt = target.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        token = target.model(prompt).logits[0, -1].argmax()
    assert target.tokenizer.decode(token) == " Paris"


def test_names_that_stand_for_nothing(tmp_path):
    for name in (str(tmp_path / "absent"), "./absent", "~/absent/model", "a/b/c"):
        with pytest.raises(UserError, match="no such folder"):
            resolve_target(name)
    with pytest.raises(UserError, match="no config.json in it"):
        resolve_target(str(tmp_path))
    (tmp_path / "model.bin").touch()
    with pytest.raises(UserError, match="must be a folder or end in .gguf"):
        resolve_target(str(tmp_path / "model.bin"))
    with pytest.raises(UserError, match="absent.gguf: no such file"):
        load_target(str(tmp_path / "absent.gguf"))


def test_adapters_have_to_be_merged(folder, tiny_llama, tmp_path):
    alone = tmp_path / "adapter"
    model = get_peft_model(copy.deepcopy(tiny_llama[0]), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(alone)
    merged = "merge the adapter into its model first"
    with pytest.raises(UserError, match=f"no config.json in it; {merged}"):
        load_target(str(alone))
    for path in alone.glob("adapter_*"):  # beside the whole model, as some programs write it
        shutil.copy(path, folder)
    with pytest.raises(UserError, match=f"must be a model without adapters, got .*; {merged}"):
        load_target(str(folder))


def test_a_misspelt_name_is_an_error_before_the_hub_is_asked():
    with pytest.raises(UserError, match="no such target; did you mean smollm2-135m-instruct"):
        resolve_target("SmolLM2-135M-instrcut")
    for hub_id in ("someone/smollm2-135m-instruct", "gpt2"):
        assert resolve_target(hub_id) == hub_id


def test_a_folder_may_have_a_known_name(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    folder.rename("SmolLM2-135M-Instruct")
    assert resolve_target("SmolLM2-135M-Instruct") == "SmolLM2-135M-Instruct"
    assert not is_known("SmolLM2-135M-Instruct") and is_known("SmolLM2-135M-INSTRUCT")
    Path("SmolLM2-135M-Instruct").rename(SMOLLM2)  # as bundles record the fetched one
    assert is_known(SMOLLM2)


def test_an_unknown_hub_id(monkeypatch):
    assert resolve_target("no-such-organization/model") == "no-such-organization/model"
    for load in (load_target, load_tokenizer):
        with pytest.raises(UserError, match="no-such-organization/model: .* check the name and the network"):
            load("no-such-organization/model")


def damage_config(folder):
    (folder / "config.json").write_text("{")


def damage_sizes(folder):
    edit_json(folder / "config.json", num_attention_heads=0)


def damage_type(folder):
    edit_json(folder / "config.json", model_type="no-such-type")


def damage_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def remove_weights(folder):
    (folder / "model.safetensors").unlink()


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def remove_two(folder):
    names = ("model.layers.0.mlp.up_proj.weight", "lm_head.weight")
    change_weights(folder, lambda weights: [weights.pop(name) for name in names])


def resize_one(folder):
    change_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))


def remove_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def damage_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


def remove_eos(folder):
    edit_json(folder / "tokenizer_config.json", eos_token=None)


def save_encoder(folder):
    config = BertConfig(vocab_size=512, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    BertForMaskedLM(config).save_pretrained(folder)


def save_encoder_decoder(folder):
    config = T5Config(vocab_size=512, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(folder)


@pytest.mark.parametrize(
    "damage, message",
    [
        (damage_config, "cannot load its tokenizer .*not a valid JSON file"),
        (damage_type, "cannot load its config .*no-such-type"),
        (damage_weights, "cannot load its weights"),
        (remove_weights, "cannot load its weights .*no file named model.safetensors"),
        (remove_two, "no weights for lm_head.weight, model.layers.0.mlp.up_proj.weight; the checkpoint"),
        (resize_one, r"model.norm.weight is stored as \[3\] and config.json wants \[64\]"),
        (damage_sizes, "cannot load its tokenizer"),
        (remove_tokenizer, "cannot load its tokenizer .*put the model's own tokenizer.json and"),
        (damage_tokenizer, "cannot load its tokenizer"),
        (remove_eos, "its tokenizer has no EOS token"),
        (save_encoder, "must be a causal language model .*, got BertForMaskedLM"),
        (save_encoder_decoder, "must be a causal language model .*, got T5ForConditionalGeneration"),
    ],
)
def test_damaged_folders_are_refused_in_one_line(folder, damage, message):
    load_target(str(folder), device="cpu")
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        load_target(str(folder), device="cpu")
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_a_model_without_head_is_refused(folder, tiny_llama):
    tiny_llama[0].model.save_pretrained(folder)
    with pytest.raises(UserError, match="must be a causal language model .*, got LlamaModel"):
        load_target(str(folder))


def test_a_tokenizer_of_another_model_is_refused(folder, tiny_llama):
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens(["one", "more"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="514 tokens but the model 512 embedding rows"):
        load_target(str(folder))


class Runs:
    """Unpickled it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_not_read(folder, tmp_path, name):
    (folder / "model.safetensors").unlink()
    torch.save({"weights": Runs(tmp_path / "ran")}, folder / name)
    with pytest.raises(UserError, match=f"weights must be safetensors, got {name}, a pickle"):
        load_target(str(folder), dtype="float32", device="cpu")
    assert not (tmp_path / "ran").exists()


def test_pickles_are_read_where_the_user_asks_for_it(folder, monkeypatch):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="or set DRAFTTRAIN_ALLOW_PICKLES=1 if you trust it"):
        load_target(str(folder), dtype="float32", device="cpu")
    monkeypatch.setenv("DRAFTTRAIN_ALLOW_PICKLES", "1")
    target = load_target(str(folder), dtype="float32", device="cpu")
    name = next(iter(weights))
    assert torch.equal(target.model.state_dict()[name], weights[name])


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_process_of_a_launch_has_a_gpu_of_its_own(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert loading._device(device) == torch.device("cuda", 1)


def test_the_home_of_nobody_is_no_folder():
    with pytest.raises(UserError, match="~nobody-here/model"):
        resolve_target("~nobody-here/model")


def test_sizes_of_each_block_count_as_the_largest(tiny_llama, monkeypatch):
    """Gemma 3n's config has a list of them."""
    config, asked = copy.deepcopy(tiny_llama[0].config), []
    config.__dict__["intermediate_size"] = [32, 64, 48]
    monkeypatch.setattr(loading, "resolve_dtype", lambda *given: asked.append(given))
    loading.dtype_for(config, "auto", torch.device("cpu"), "products")
    assert asked[0][-2:] == (config.hidden_size, 64)


def test_a_generation_config_need_not_name_a_stop_token(folder):
    edit_json(folder / "generation_config.json", eos_token_id=None)
    target = load_target(str(folder), dtype="float32", device="cpu")
    assert target.eos_token_ids == {target.tokenizer.eos_token_id}
    edit_json(folder / "generation_config.json", eos_token_id=["2"])
    with pytest.raises(UserError, match="eos_token_id: must be token ids, got .*'2'"):
        load_target(str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("record", [["somebody's"], {"kind": "somebody's"}])
def test_a_record_of_somebody_else_names_no_target(record, tiny_llama, tmp_path):
    model, tokenizer = tiny_llama
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "target.json").write_text(json.dumps(record))
    assert load_target(str(tmp_path), dtype="float32", device="cpu").name == str(tmp_path)
