"""A drafter with an int8 head, from its training to a bundle and back."""

import json

import torch
from safetensors.torch import load_file

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.drafters.int8 import int8_rows
from drafttrain.drafters.weights import HEAD, NUMBERS
from drafttrain.export.config import ExportConfig
from drafttrain.export.formats import export_to
from drafttrain.export.write import export
from drafttrain.target_lm.model import weights_hash

SHAPE = DrafterConfig(tapped_blocks=[-2], head_dtype="int8")


def trained(target, folder) -> EddModel:
    torch.manual_seed(0)
    drafter = EddModel(EddConfig.for_target(target, SHAPE, 200))
    drafter.initialize_from(target, SHAPE, torch.arange(200))
    before = drafter.lm_head.weight.detach().clone()
    drafter.finish()
    numbers, scales = int8_rows(before)
    assert torch.equal(drafter.lm_head.weight, numbers.float() * scales[:, None])
    drafter.save_pretrained(folder)
    return drafter


def test_a_bundle_has_the_head_that_was_trained(tiny_target, tmp_path):
    """The same bits in the drafter's folder, in the bundle, in a bundle of the bundle, and in memory: what
    was measured on one holds for all."""
    drafter = trained(tiny_target, tmp_path / "drafter")
    bundle = export(ExportConfig(), tmp_path / "drafter", tmp_path / "bundle")
    again = export(ExportConfig(), bundle, tmp_path / "again")
    stored = load_file(bundle / "model.safetensors")
    assert stored[NUMBERS].dtype == torch.int8 and HEAD not in stored
    assert stored["layers.0.k_proj.weight"].dtype == torch.bfloat16
    assert (bundle / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert json.loads((bundle / "config.json").read_text())["head_dtype"] == "int8"
    assert "bfloat16, the LM head int8" in (bundle / "README.md").read_text()
    read = EddModel.load(bundle, tiny_target)
    assert read.lm_head.weight.dtype == torch.bfloat16
    wide = EddModel.load(bundle, tiny_target, dtype=torch.float32)
    assert torch.equal(wide.lm_head.weight, drafter.lm_head.weight)
    hashes = {weights_hash(EddModel.load(tmp_path / name, tiny_target)) for name in ("drafter", "bundle")}
    assert len(hashes) == 1  # a calibration of the one is of the other


def test_other_formats_get_a_head_of_one_dtype(tiny_target, tmp_path):
    shape = DrafterConfig(kind="vdm", head_dtype="int8")
    from drafttrain.drafters.new import new_drafter

    drafter = new_drafter(tiny_target, shape, torch.arange(200))
    drafter.finish()
    drafter.save_pretrained(tmp_path / "drafter")
    bundle = export(ExportConfig(), tmp_path / "drafter", tmp_path / "bundle")
    export_to("causal-lm", bundle, tmp_path / "out", tiny_target, dtype=None)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.bfloat16}
