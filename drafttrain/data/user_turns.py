"""Refuse chat templates that drop what the user says, with which a target would answer nothing."""

from transformers import PreTrainedTokenizerBase

from drafttrain.data.message import Message
from drafttrain.data.template import render
from drafttrain.utils.errors import UserError

PROBE = "a probing turn"


def require_user_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    """Require that the chat template shows a user's turn; it may change long or special ones.

    Raises:
        UserError: it does not, or cannot render one.
    """
    if PROBE not in render(tokenizer, [Message("user", PROBE)], "probe", generation_prompt=True):
        raise UserError(
            f"{tokenizer.name_or_path}: chat template must show the user's turns, got one without them; "
            "correct it or use another one"
        )
