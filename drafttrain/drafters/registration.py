"""Register every kind of drafter with transformers, so that `AutoModel.from_pretrained` knows them."""

from transformers import AutoConfig, AutoModel

from drafttrain.drafters.auto import load_drafter, model_class
from drafttrain.drafters.config import KINDS

__all__ = ["load_drafter"]  # `from drafttrain import load_drafter` registers the kinds

for _model in map(model_class, KINDS):
    AutoConfig.register(_model.config_class.model_type, _model.config_class)
    AutoModel.register(_model.config_class, _model)
