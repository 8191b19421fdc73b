"""Keep the drafter of the best evaluation.

It is judged by accept_len, not by the loss: a drafter can come closer to the target on held-out text while
fewer of its tokens are accepted.
"""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainerState

from drafttrain.drafters.model import DraftModel
from drafttrain.utils.errors import brief
from drafttrain.utils.folders import new_folder

STATE = "trainer_state.json"  # the last file of a checkpoint that the Trainer writes
COMPUTED = "computed.json"  # how a checkpoint's steps were computed


class KeepBest(TrainerCallback):
    """Keep the drafter of the best evaluation in `folder/best-STEP`.

    Args:
        warn: called with one line if the best drafter of an earlier attempt is gone.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]):
        self.folder, self.warn = folder, warn
        self.lost: set[int] = set()  # steps whose drafters are gone
        self.saved = -1  # step of the best drafter in the last checkpoint's log

    def on_train_begin(self, args, state, control, **kwargs):
        """Find the best drafter that an earlier attempt has kept; warn if it is gone."""
        best = first = best_evaluation(state)
        while best is not None and not self._place(best["step"]).exists():
            self.lost.add(best["step"])
            best = best_evaluation(state, self.lost)
        if self.lost:
            self.warn(
                f"{self._place(first['step'])}: must hold the best drafter so far (accept_len "
                f"{first['eval_accept_len']:.3f}), got none; the best of the others is taken"
            )
        self.saved = best["step"] if best else self.saved

    def on_evaluate(self, args, state, control, model, **kwargs):
        best = best_evaluation(state, self.lost)
        if best is None or best["step"] != state.global_step or not state.is_world_process_zero:
            return
        with new_folder(self._place(best["step"])) as folder:
            model.save_pretrained(folder)

        self._forget_all_but(best["step"], self.saved)

    def on_save(self, args, state, control, **kwargs):
        """Remove the previous best drafter: a resumed training would find the better one in its log."""
        best = best_evaluation(state, self.lost)
        if best is not None and state.is_world_process_zero and self._place(best["step"]).exists():
            self.saved = best["step"]
            self._forget_all_but(self.saved)

    def _forget_all_but(self, *steps: int) -> None:
        for other in set(self.folder.glob("best-*")) - {self._place(step) for step in steps}:
            shutil.rmtree(other, ignore_errors=True)

    def restore(self, drafter: DraftModel, state: TrainerState) -> int:
        """Load the best drafter's weights unless it is the last one; return the step of the result."""
        best = best_evaluation(state, self.lost)
        if best is None or best["step"] == state.global_step:
            return state.global_step
        try:
            weights = load_file(self._place(best["step"]) / "model.safetensors")
        except (OSError, SafetensorError) as error:
            place = self._place(best["step"])
            self.warn(f"{place}: must be readable, got {brief(error)}; the last drafter is taken")
            return state.global_step
        drafter.load_state_dict(weights, strict=False)
        return best["step"]

    def _place(self, step: int) -> Path:
        return self.folder / f"best-{step}"


def best_evaluation(state: TrainerState, lost: Collection[int] = ()) -> dict[str, float] | None:
    """Return the log's latest evaluation with an accept_len within the standard error of the highest, from
    which the prompts cannot tell it apart: later ones have learned more. None without any.

    Args:
        lost: steps whose evaluations are ignored.
    """
    found = [one for one in state.log_history if one.get("eval_accept_len") and one["step"] not in lost]
    if not found:
        return None
    highest = max(found, key=lambda one: one["eval_accept_len"])
    least = highest["eval_accept_len"] - highest.get("eval_accept_len_error", 0.0)
    return next(one for one in reversed(found) if one["eval_accept_len"] >= least)
