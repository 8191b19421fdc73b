"""Refuse chat templates that drop the user's turns: the target would not see any question."""

from transformers import PreTrainedTokenizerBase

from drafttrain.data.message import Message
from drafttrain.data.template import render
from drafttrain.utils.errors import UserError

PROBE = "a probing turn"


def require_user_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    """Require that the chat template renders a simple user turn; it may change long or special ones.

    Raises:
        UserError: the template drops the turn, or cannot render it.
    """
    if PROBE not in render(tokenizer, [Message("user", PROBE)], "probe", generation_prompt=True):
        raise UserError(
            f"{tokenizer.name_or_path}: chat template must show the user's turns, got one without them; "
            "correct it or use another one"
        )
