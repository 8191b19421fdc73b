"""One prompt's decoding seen from inside: the tree of each iteration, the path that was accepted, the text.

The shipped loop decodes; only its proposer is wrapped, in one that notes the trees. What was accepted follows
from the loop's steps.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drafttrain.bundle import load_bundle
from drafttrain.decoder import SpeculativeDecoder, TextStream
from drafttrain.inference.decode import decode
from drafttrain.inference.proposer import Proposer
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json, write_json

FORMAT_VERSION = 1
LEAST = -100.0  # log-probability at which impossible drafts are noted


@dataclass
class Iteration:
    """What one target forward verified and emitted.

    Attributes:
        tokens, parents, depths: the tree's nodes as in `TokenTree`, root first; none for the prompt's own
            forward.
        texts: of each node's token by itself.
        log_probs: of each node given its parent, natural logarithm; 0 throughout where drafts come from no
            distribution.
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
        """Raises:
        ValueError: lists that do not fit each other, or nodes that are no tree.
        """
        n = len(self.tokens)
        if {len(self.parents), len(self.depths), len(self.texts), len(self.log_probs)} != {n}:
            raise ValueError("a tree is incomplete")
        if not all(above < i for i, above in enumerate(self.parents)) or min(self.parents[1:], default=0) < 0:
            raise ValueError("a node stands before its parent")
        if (
            any(self.parents[b] != a for a, b in zip(self.path, self.path[1:]))
            or max(self.path, default=-1) >= n
        ):
            raise ValueError("a path is none in its tree")
        if len(self.pieces) != len(self.emitted) or self.drafted > len(self.emitted):
            raise ValueError("emitted tokens and texts differ in number")
        if self.tokens and (self.path[:1] != [0] or len(self.path) != self.drafted + 1):
            raise ValueError("a path is not that of the drafted tokens")
        if not all(isinstance(text, str) for text in [*self.texts, *self.pieces]):
            raise ValueError("a text is none")
        sum(self.log_probs)  # numbers


@dataclass
class Trace:
    """The greedy decoding of one prompt.

    Attributes:
        target: its name.
        tree: how drafts grew; None where that was not told.
        dtype: of the target.
        prompt: what the user said; None for bare token ids.
        prompt_tokens: how many the prompt has, template included.
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
        """The whole output."""
        return "".join(piece for iteration in self.iterations for piece in iteration.pieces)

    @property
    def accept_len(self) -> float:
        """Tokens emitted per target forward after the prompt's."""
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
        try:
            found = cls(**{**values, "iterations": [Iteration(**item) for item in values["iterations"]]})
            for iteration in found.iterations:
                iteration.check()
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(f"{path}: damaged ({error}); {remedy}") from None
        return found


class NotedTrees(Proposer):
    """A proposer that passes everything on to another one and notes the tree it proposed last."""

    def __init__(self, proposer: Proposer):
        self._proposer = proposer
        self._last: TokenTree | None = None

    @property
    def model_seconds(self) -> float:
        return self._proposer.model_seconds

    def new_state(self, batch: int, max_len: int) -> Any:
        return self._proposer.new_state(batch, max_len)

    def select_rows(self, state: Any, rows: torch.Tensor) -> Any:
        return self._proposer.select_rows(state, rows)

    def append_rows(self, state: Any, other: Any) -> Any:
        return self._proposer.append_rows(state, other)

    def update(self, state: Any, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        self._proposer.update(state, tokens, tapped, counts)

    def set_active(self, numbers: Sequence[int]) -> None:
        self._proposer.set_active(numbers)

    def harvest(self, state: Any, tree: TokenTree, logits: torch.Tensor) -> None:
        self._proposer.harvest(state, tree, logits)

    def propose(self, state: Any, root: torch.Tensor) -> TokenTree:
        self._last = self._proposer.propose(state, root)
        return self._last

    def take(self) -> TokenTree | None:
        """The tree proposed since the last call; None if there was none."""
        last, self._last = self._last, None
        return last


def trace(target: FrozenTarget, proposer: Proposer, prompt_ids: list[int], max_new_tokens: int) -> Trace:
    """Decode one prompt greedily and note every iteration.

    Args:
        target: with a tokenizer, or texts are empty.

    Raises:
        UserError: as `decode`.
    """
    noted, stream, tokenizer = NotedTrees(proposer), TextStream(target.tokenizer), target.tokenizer
    iterations: list[Iteration] = []
    left, reason = max_new_tokens, None
    for step in decode(target, noted, [prompt_ids], max_new_tokens):
        [emitted], [drafted], [reason] = step.tokens, step.drafted, step.finish_reason
        nodes: dict[str, list] = {name: [] for name in ("tokens", "parents", "depths", "log_probs")}
        if (tree := noted.take()) is not None:
            tree = tree.select(tree.depths < left)  # the loop drops what could not be emitted any more
            nodes = {name: getattr(tree, name)[0].tolist() for name in nodes}
            nodes["log_probs"] = [max(p, LEAST) for p in nodes["log_probs"]]  # JSON has no infinity
        pieces = [stream.push([token]) for token in emitted]
        if reason and pieces:
            pieces[-1] += stream.flush()
        iterations.append(
            Iteration(
                **nodes,
                texts=["" if tokenizer is None else tokenizer.decode([token]) for token in nodes["tokens"]],
                path=find_path(nodes["tokens"], nodes["parents"], emitted[:drafted]),
                emitted=emitted,
                pieces=pieces,
                drafted=drafted,
            )
        )
        left -= len(emitted)
    dtype = str(target.dtype).removeprefix("torch.")
    return Trace(target.name, None, dtype, None, len(prompt_ids), max_new_tokens, reason, iterations)


def find_path(tokens: list[int], parents: list[int], drafted: list[int]) -> list[int]:
    """Nodes from the root on whose tokens are these; none for a tree without nodes.

    Siblings may hold the same token (branches of n-grams), so the path that goes on is searched for.
    """
    ends = {0: [0]} if tokens else {}  # node -> path to it
    for token in drafted:
        ends = {
            node: [*ends[parent], node]
            for node, (found, parent) in enumerate(zip(tokens, parents))
            if found == token and parent in ends
        }
    return next(iter(ends.values()), [])


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
    """`drafttrain report --prompt`: the trace of a prompt with a bundle, written to a file.

    Args:
        bundle: folder or Hub id.
        out: the JSON file to write.
        tree: how drafts grow. None: what the bundle recommends.
        calibration: for `pct`, `timed` and `c2t`. None: the bundle's own.

    Raises:
        UserError: no such bundle, or it does not fit the target; an empty or too long prompt.
    """
    if Path(out).is_dir():
        raise UserError(f"{out}: is a folder; name a file to write")
    loaded = load_bundle(bundle, target=target, dtype=dtype, calibration=calibration)
    proposer = loaded.proposer(tree)
    ids = SpeculativeDecoder(loaded.target, proposer).encode(prompt)
    found = trace(loaded.target, proposer, ids, max_new_tokens)
    found.prompt, found.tree = prompt, tree or loaded.tree
    found.save(out)
    return found
