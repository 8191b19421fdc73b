"""Write the tests' tiny target and a random EDD drafter for it, to measure the structure's figures on.

python -m studies.tiny_model FOLDER        FOLDER/target and FOLDER/bundle
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.edd import EddConfig, EddModel
from drafttrain.target_lm.loading import load_target
from tests.conftest import tiny_model, tiny_tokenizer

POSITIONS = 4096  # the tests' own 512 are fewer than a real target's and would not hold default lengths


def write(folder: Path) -> None:
    """Write both; the bundle's target is the absolute path of the other folder."""
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = POSITIONS
    model = tiny_model(LlamaConfig, LlamaForCausalLM, tokenizer)
    model.config.max_position_embeddings = POSITIONS
    place = (folder / "target").resolve()
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    target = load_target(str(place), dtype="float32", device="cpu")
    config = DrafterConfig(tapped_blocks=[-2])
    drafter = EddModel(EddConfig.for_target(target, config, 200))
    drafter.initialize_from(target, config, torch.arange(200))
    drafter.save_pretrained(folder / "bundle")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
