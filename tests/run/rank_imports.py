"""Imports of a rank, made once by the process that the tests fork their ranks from."""

import os

# as the command does before it imports torch and transformers
os.environ |= {"TORCH_CPP_LOG_LEVEL": "FATAL", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

from drafttrain import pipeline_decoder  # noqa: E402, F401
from drafttrain.run import cli  # noqa: E402, F401
