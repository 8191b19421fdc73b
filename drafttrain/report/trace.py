"""Record the decoding of one prompt: the tree of each iteration, the path that was accepted, the text.

The normal loop decodes; only its acceptance rule is wrapped, in one that records trees and accepted paths.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from drafttrain.bundle import load_bundle
from drafttrain.decoder import SpeculativeDecoder
from drafttrain.evaluation.drafts import NotingRule
from drafttrain.inference.decode import decode
from drafttrain.inference.proposer import Proposer
from drafttrain.inference.text import TextStream
from drafttrain.kernels.machine import dtype_name
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json, usable
from drafttrain.utils.types import check_types
from drafttrain.utils.writing import write_json

FORMAT_VERSION = 1
LEAST = -100.0  # log-probability that is recorded for impossible drafts
NODES = ("tokens", "parents", "depths", "log_probs")


@dataclass
class Iteration:
    """The nodes that one target forward verified, and the tokens that it emitted.

    Attributes:
        tokens, parents, depths: the tree's nodes as in `TokenTree`, root first; none for the prompt's own
            forward.
        texts: of each node's token by itself.
        log_probs: of each node given its parent, natural logarithm; all 0 if drafts, such as n-grams, come
            from no distribution.
        path: nodes that were accepted and emitted, from the root on.
        emitted: token ids; the drafted ones come first.
        pieces: text that became certain with each of them; they add up to the output.
        drafted: how many of them were drafted.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    texts: list[str]
    log_probs: list[float]
    path: list[int]
    emitted: list[int]
    pieces: list[str]
    drafted: int

    def check(self) -> None:
        """Validate the structure of what was read from a file; `Trace.load` validates the types.

        Raises:
            ValueError: lists that do not fit each other, or nodes that are no tree.
        """
        n = len(self.tokens)
        if {len(self.parents), len(self.depths), len(self.texts), len(self.log_probs)} != {n}:
            raise ValueError("a tree is incomplete")
        if not all(above < i for i, above in enumerate(self.parents)) or min(self.parents[1:], default=0) < 0:
            raise ValueError("a node comes before its parent")
        if (
            any(self.parents[b] != a for a, b in zip(self.path, self.path[1:]))
            or max(self.path, default=-1) >= n
        ):
            raise ValueError("a path is none in its tree")
        if len(self.pieces) != len(self.emitted) or not 0 <= self.drafted <= len(self.emitted):
            raise ValueError("emitted tokens and texts differ in number")
        if self.tokens and (self.path[:1] != [0] or len(self.path) != self.drafted + 1):
            raise ValueError("a path is not that of the drafted tokens")
        if not all(isinstance(text, str) for text in [*self.texts, *self.pieces]):
            raise ValueError("a text is none")


@dataclass
class Trace:
    """The greedy decoding of one prompt.

    Attributes:
        target: its name.
        tree: growth policy; None if unknown.
        dtype: of the target.
        prompt: the user's text; None for bare token ids.
        prompt_tokens: tokens of the prompt, template included.
        max_new_tokens: limit of the output.
        finish_reason: "stop" or "length".
        iterations: the first one is the prompt's own forward, which drafts nothing.
    """

    target: str
    tree: str | None
    dtype: str
    prompt: str | None
    prompt_tokens: int
    max_new_tokens: int
    finish_reason: str
    iterations: list[Iteration]
    format_version: int = FORMAT_VERSION

    @property
    def text(self) -> str:
        """Return the whole output."""
        return "".join(piece for iteration in self.iterations for piece in iteration.pieces)

    @property
    def accept_len(self) -> float:
        """Return the tokens emitted per target forward after the prompt's."""
        steps = self.iterations[1:]
        return sum(len(step.emitted) for step in steps) / len(steps) if steps else 0.0

    def save(self, path: str | os.PathLike) -> None:
        """Write the trace as JSON, whole or not at all."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Trace":
        """Read what `save` wrote.

        Raises:
            UserError: missing, damaged or of another format.
        """
        values = read_json(path)
        remedy = "make it again with drafttrain report --prompt"
        if not isinstance(values, dict) or values.get("format_version") != FORMAT_VERSION:
            raise UserError(f"{path}: no trace of format {FORMAT_VERSION}; {remedy}")
        with usable(path, remedy):
            iterations = [Iteration(**item) for item in values["iterations"]]
            for iteration in iterations:
                iteration.check()
            found = cls(**{**values, "iterations": iterations})
            check_types(found)
        return found


def trace(target: FrozenTarget, proposer: Proposer, prompt_ids: list[int], max_new_tokens: int) -> Trace:
    """Decode one prompt greedily and record every iteration.

    Args:
        target: with a tokenizer, or texts are empty.

    Raises:
        UserError: as `decode`.
    """
    rule, stream, tokenizer = NotingRule(), TextStream(target.tokenizer), target.tokenizer
    iterations: list[Iteration] = []
    reason = None
    for step in decode(target, proposer, [prompt_ids], max_new_tokens, accept=rule):
        [emitted], [drafted], [reason] = step.tokens, step.drafted, step.finish_reason
        nodes, path = {name: [] for name in NODES}, []
        if iterations:  # the first step encodes the prompt, without a draft
            nodes = {name: getattr(rule.tree, name)[0].tolist() for name in NODES}
            nodes["log_probs"] = [max(p, LEAST) for p in nodes["log_probs"]]  # JSON has no infinity
            path = rule.accepted.path[0, : drafted + 1].tolist()
        pieces = [stream.push([token]) for token in emitted]
        if reason and pieces:
            pieces[-1] += stream.flush()
        texts = ["" if tokenizer is None else tokenizer.decode([token]) for token in nodes["tokens"]]
        iterations.append(
            Iteration(**nodes, texts=texts, path=path, emitted=emitted, pieces=pieces, drafted=drafted)
        )
    dtype = dtype_name(target.dtype)
    return Trace(target.name, None, dtype, None, len(prompt_ids), max_new_tokens, reason, iterations)


def trace_prompt(
    bundle: str,
    prompt: str,
    out: str | os.PathLike,
    target: str | None = None,
    dtype: str = "auto",
    tree: str | None = None,
    calibration: str | None = None,
    max_new_tokens: int = 96,
) -> Trace:
    """Trace a prompt with a bundle, and write the trace to a file.

    Args:
        bundle: folder or Hub id.
        out: the JSON file to write.
        tree: growth policy. None: the bundle's recommended one.
        calibration: for `pct`, `timed` and `c2t`. None: the bundle's own.

    Raises:
        UserError: no such bundle, or it does not fit the target; an empty or too long prompt.
    """
    if Path(out).is_dir():
        raise UserError(f"{out}: is a folder; name a file to write")
    loaded = load_bundle(bundle, target=target, dtype=dtype, calibration=calibration)
    proposer = loaded.proposer(tree)
    ids = SpeculativeDecoder(loaded.target, proposer).encode(prompt)
    result = trace(loaded.target, proposer, ids, max_new_tokens)
    result.prompt, result.tree = prompt, tree or loaded.tree
    result.save(out)
    return result
