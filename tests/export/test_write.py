"""A drafter with int8 matrices, from its training to a bundle and back."""

import json

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.drafters.int8 import HEAD, int8_rows
from drafttrain.export.config import ExportConfig
from drafttrain.export.formats import export_to
from drafttrain.export.write import export
from drafttrain.target_lm.model import weights_hash
from drafttrain.utils.errors import UserError

INT8 = {"head_dtype": "int8", "layers_dtype": "int8"}
LAYER = "layers.0.k_proj.weight"


def trained(target, folder, **dtypes) -> EddModel:
    torch.manual_seed(0)
    shape = DrafterConfig(tapped_blocks=[-2], **dtypes)
    drafter = EddModel(EddConfig.for_target(target, shape, 200))
    drafter.initialize_from(target, shape, torch.arange(200))
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    drafter.finish()
    after = drafter.state_dict()
    for name, dtype in ((HEAD, "head_dtype"), (LAYER, "layers_dtype")):
        numbers, scales = int8_rows(before[name])
        expected = numbers.float() * scales[:, None] if dtype in dtypes else before[name]
        assert torch.equal(after[name], expected)
    drafter.save_pretrained(folder)
    return drafter


@pytest.mark.parametrize("names", [["head_dtype"], ["layers_dtype"], ["head_dtype", "layers_dtype"]])
def test_a_bundle_has_the_matrices_that_were_trained(names, tiny_target, tmp_path):
    """The same bits in the drafter's folder, in the bundle, in a bundle of the bundle, and in memory: what
    was measured on one holds for all."""
    drafter = trained(tiny_target, tmp_path / "drafter", **{name: INT8[name] for name in names})
    bundle = export(ExportConfig(), tmp_path / "drafter", tmp_path / "bundle")
    again = export(ExportConfig(), bundle, tmp_path / "again")
    stored = load_file(bundle / "model.safetensors")
    config, card = json.loads((bundle / "config.json").read_text()), (bundle / "README.md").read_text()
    own = {"head_dtype": (HEAD, "the LM head int8"), "layers_dtype": (LAYER, "the layers' matrices int8")}
    for key, (weight, words) in own.items():
        numbers = weight.removesuffix("weight") + "int8"
        assert (numbers in stored) == (weight not in stored) == (words in card) == (key in names)
        assert config.get(key) == ("int8" if key in names else None)
        assert key not in names or stored[numbers].dtype == torch.int8
    floating = {tensor.dtype for tensor in stored.values() if tensor.is_floating_point()}
    assert floating == {torch.bfloat16}
    assert (bundle / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    read = EddModel.load(bundle, tiny_target)
    assert read.lm_head.weight.dtype == read.layers[0].k_proj.weight.dtype == torch.bfloat16
    wide = EddModel.load(bundle, tiny_target, dtype=torch.float32).state_dict()
    rounded = [own[name][0] for name in names]
    assert all(torch.equal(wide[weight], drafter.state_dict()[weight]) for weight in rounded)
    hashes = {weights_hash(EddModel.load(tmp_path / name, tiny_target)) for name in ("drafter", "bundle")}
    assert len(hashes) == 1  # a calibration of the one is of the other


@pytest.mark.parametrize("dtypes", [{"head_dtype": "int8"}, INT8])
def test_other_formats_get_one_dtype(dtypes, tiny_target, tmp_path):
    shape = DrafterConfig(kind="vdm", **dtypes)
    from drafttrain.drafters.new import new_drafter

    drafter = new_drafter(tiny_target, shape, torch.arange(200))
    drafter.finish()
    drafter.save_pretrained(tmp_path / "drafter")
    bundle = export(ExportConfig(), tmp_path / "drafter", tmp_path / "bundle")
    export_to("causal-lm", bundle, tmp_path / "out", tiny_target, dtype=None)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.bfloat16}


@pytest.mark.parametrize("part", ["calibration", "classifier"])
def test_a_folder_without_the_files_asked_for_is_one_line(part, tiny_bundle, tmp_path):
    with pytest.raises(UserError, match=f"{part}.json: no such file"):
        export(ExportConfig(), tiny_bundle, tmp_path / "bundle", **{part: tmp_path})
    assert not (tmp_path / "bundle").exists()
