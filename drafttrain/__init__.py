"""drafttrain trains drafters for large language models, and decodes with them: exactly, and faster.

    from drafttrain import SpeculativeDecoder

    decoder = SpeculativeDecoder.from_pretrained("path/or/hub-id")
    print(decoder.generate("Why is the sky blue?").text)

`from drafttrain import load_drafter` also registers every kind of drafter with transformers, so that
`AutoModel.from_pretrained` knows it. Modules are imported on first use, so that the command line answers
`--help` at once.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_HOMES = {
    "EddConfig": "drafttrain.drafters.edd",
    "EddModel": "drafttrain.drafters.edd",
    "generate": "drafttrain.custom_generate",
    "generate_of_repository": "drafttrain.custom_generate",
    "load_drafter": "drafttrain.drafters.registration",
    "PipelineConfig": "drafttrain.pipeline.config",
    "PipelineDecoder": "drafttrain.pipeline_decoder",
    "SamplingParams": "drafttrain.inference.params",
    "SimulateConfig": "drafttrain.pipeline.config",
    "simulate": "drafttrain.run.simulate",
    "SpeculativeDecoder": "drafttrain.decoder",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'drafttrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
