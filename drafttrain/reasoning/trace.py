"""The record of a tree of thoughts as JSON: prompts, answers, seeds, scores, and the path to the result."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.reasoning.interface import Answer
from drafttrain.reasoning.lines import Numbered
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import write_json

FORMAT_VERSION = 2  # in format 1 a level took two rounds or more
ASKED = ("path", "number", "prompt", "seed", "max_new_tokens", "stop", "begin")
REMEDY = "remove it, or name another place under out"


@dataclass
class Trace:
    """The record of one tree.

    Attributes:
        task: its name.
        problem: id and text.
        settings: of the search, and the models if a recipe names them.
        rounds: in order, each with its seconds and its calls, grouped by line. A call has the path of its
            node, its number there, prompt, seed, limits and answer.
        states: all nodes in the order in which they were made, the root first and the closing one last; empty
            until the tree is finished, like the attributes below.
        leaf: path of the best leaf; None if every branch has failed.
        closing: the closing generation.
        result: the task's check of the closing generation.
        without_score: number of answers of the state evaluator that had no score.
        error: why there is no result.
    """

    task: str
    problem: dict[str, str]
    settings: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    leaf: list[int] | None = None
    closing: dict[str, str] | None = None
    result: dict[str, Any] | None = None
    without_score: int = 0
    error: str | None = None
    finished: bool = False
    format_version: int = FORMAT_VERSION

    @property
    def seconds(self) -> float:
        """Return the time of all rounds."""
        return sum(entry["seconds"] for entry in self.rounds)

    def save(self, path: str | os.PathLike) -> None:
        """Write the trace as JSON, atomically."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Trace":
        """Load a trace that `save` wrote.

        Raises:
            UserError: the file is missing, damaged or of another format.
        """
        values = read_json(path)
        if not isinstance(values, dict) or values.get("format_version") != FORMAT_VERSION:
            raise UserError(f"{path}: must be a trace of format {FORMAT_VERSION}, got another file; {REMEDY}")
        try:
            if missing := [name for name in ("task", "problem", "settings") if name not in values]:
                raise ValueError(f"without {missing[0]}")
            trace = cls(**values)
            if not isinstance(trace.settings, dict) or not isinstance(trace.problem.get("id"), str):
                raise ValueError("problem and settings must be objects")
            for entry in trace.rounds:
                for call in entry["calls"]:
                    if not isinstance(answer_of(call).text, str):
                        raise ValueError("text must be a text")
                numbers = [n for call in entry["calls"] for n in (*call["path"], call["number"])]
                if not all(isinstance(number, int | float) for number in (entry["seconds"], *numbers)):
                    raise ValueError("seconds, path and number must be numbers")
            return trace
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: damaged ({error}); {REMEDY}") from None

    def check_same(self, other: "Trace", path: Path) -> None:
        """Require that another trace has the same task, problem and settings.

        Args:
            path: file of this trace, for the error.

        Raises:
            UserError: one of them differs.
        """
        old = {"task": self.task, "problem": self.problem["id"], **self.settings}
        new = {"task": other.task, "problem": other.problem["id"], **other.settings}
        for key, value in new.items():
            if key in old and old[key] != value:
                raise UserError(f"{path}: must be the trace of {key} {value}, got {old.get(key)}; {REMEDY}")


def record(numbered: Numbered, answer: Answer) -> dict[str, Any]:
    """Return the entry of a call and its answer in a trace."""
    given = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "error": answer.error,
    }
    return _asked(numbered) | given


def answer_of(call: dict[str, Any]) -> Answer:
    """Return the answer of a recorded call."""
    return Answer(call["text"], tuple(call["token_ids"]), call["finish_reason"], call["error"])


def is_record_of(call: dict[str, Any], numbered: Numbered) -> bool:
    """Return whether a recorded call has the same node, number, prompt, seed and limits as this one."""
    return {key: call.get(key) for key in ASKED} == _asked(numbered)


def totals(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return sums over trees; trees without a result count as failures.

    Returns:
        trees, successes, those without a result, answers without a score, calls, tokens, seconds, and the
        sums of other numbers in the results, such as end_sentences_kept.
    """
    calls = [call for trace in traces for entry in trace.rounds for call in entry["calls"]]
    results = [trace.result for trace in traces if trace.result is not None]
    sums: dict[str, Any] = {
        "trees": len(traces),
        "success": sum(result["success"] for result in results),
        "without_result": len(traces) - len(results),
        "without_score": sum(trace.without_score for trace in traces),
        "calls": len(calls),
        "tokens": sum(len(call["token_ids"]) for call in calls),
        "seconds": sum(trace.seconds for trace in traces),
    }
    for key in sorted({key for result in results for key in result} - {"success"}):
        values = [result[key] for result in results]
        if all(type(value) is int for value in values):
            sums[key] = sum(values)
    return sums


def _asked(numbered: Numbered) -> dict[str, Any]:
    call = numbered.call
    values = (list(numbered.path), numbered.number, call.messages, call.sampling.seed, call.max_new_tokens)
    return dict(zip(ASKED, (*values, list(call.stop), call.begin), strict=True))
