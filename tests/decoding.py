"""Targets over the tiny models, plain references, and drafters whose quality is known beforehand."""

import itertools
import random

import pytest
import torch

from drafttrain.inference.proposer import TreeProposer
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.tree import TokenTree


@pytest.fixture(scope="session", params=["llama", "qwen2"])
def target(request) -> FrozenTarget:
    """A tiny random target, tapped at two blocks."""
    model, tokenizer = request.getfixturevalue(f"tiny_{request.param}")
    return FrozenTarget(model, tokenizer, request.param, tapped_blocks=[-2, 0])


@pytest.fixture(scope="session")
def llama(tiny_llama) -> FrozenTarget:
    model, tokenizer = tiny_llama
    return FrozenTarget(model, tokenizer, "llama", tapped_blocks=[-2, 0])


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Four prompts of unequal length, one of a single token; 0 to 2 are special tokens."""
    rng = random.Random(0)
    return [[rng.randrange(3, 512) for _ in range(n)] for n in (9, 1, 23, 4)]


@pytest.fixture(scope="session")
def greedy():
    """Greedy continuation of one prompt by transformers."""
    known: dict[tuple, list[int]] = {}

    def generate(
        target: FrozenTarget, prompt: list[int], max_new_tokens: int, stop: int | None = None
    ) -> list[int]:
        key = (target.name, tuple(prompt), max_new_tokens, stop)
        if key not in known:
            ids = torch.tensor([prompt])
            output = target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=stop,
            )
            known[key] = output[0, len(prompt) :].tolist()
        return known[key]

    return generate


class ReplayDrafter(Drafter):
    """Knows the texts that the target will write, and drafts the next token rightly where `right(row,
    position)`.

    Its draft vocabulary is a permutation of the target's. It checks what it is shown: observed tokens and
    tapped states must be those of a plain forward over the text.
    """

    def __init__(self, target: FrozenTarget, texts: list[list[int]], right):
        self.texts, self.right = texts, right
        self.draft_vocab_size = target.vocab_size
        self.from_draft = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(1))
        self.from_target = self.from_draft.argsort()
        self.turns = itertools.cycle(range(len(texts)))
        self.tapped = []
        for text in texts:
            ids = torch.tensor([text])
            states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
            tapped = [states[0][..., :0], *(states[block + 1] for block in target.tapped_blocks)]
            self.tapped.append(torch.cat(tapped, -1)[0])

    def new_state(self, batch: int, max_len: int) -> dict:
        rows = [next(self.turns) for _ in range(batch)]  # prompts are taken in their order
        return {"seen": [0] * batch, "max_len": max_len, "rows": rows}

    def select_rows(self, state: dict, rows: torch.Tensor) -> dict:
        assert len(rows) < len(state["rows"])
        kept = {name: [state[name][row] for row in rows.tolist()] for name in ("seen", "rows")}
        return {**state, **kept}

    def append_rows(self, state: dict, other: dict) -> dict:
        return {**state, **{name: state[name] + other[name] for name in ("seen", "rows")}}

    def update(self, state: dict, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        for row, count in enumerate(counts.tolist()):
            number = state["rows"][row]
            start, text = state["seen"][row], self.texts[number]
            if start >= len(text):  # ended, and replaced by another before it drafts again
                continue
            known = max(min(start + count, len(text)) - start, 0)  # a path may go beyond a stop token
            assert tokens[row, :known].tolist() == text[start : start + known]
            torch.testing.assert_close(
                tapped[row, :known], self.tapped[number][start : start + known], atol=1e-4, rtol=1e-4
            )
            state["seen"][row] += count
            assert state["seen"][row] <= state["max_len"]

    def next_token(self, row: int, position: int) -> int:
        """Return the token that it predicts at a position of a row's text."""
        text = self.texts[row]
        token = text[position] if position < len(text) else 0
        return token if self.right(row, position) else (token + 1) % self.draft_vocab_size

    def expand(self, state: dict, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        log_probs = torch.full((*frontier.shape, self.draft_vocab_size), -20.0)
        for row, nodes in enumerate(frontier.tolist()):
            for i, node in enumerate(nodes):
                position = state["seen"][row] + int(tree.depths[row, node]) + 1
                log_probs[row, i, self.from_target[self.next_token(state["rows"][row], position)]] = 0.0
        return log_probs

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        return self.from_draft[ids]


class RandomTrees(TreeProposer):
    """A proposer of random ragged trees in which the right continuation is usually somewhere."""

    def __init__(self, drafter: ReplayDrafter, seed: int, width: int):
        super().__init__(drafter, ChainPolicy(1))
        self.rng, self.width = random.Random(seed), width

    def propose(self, state: dict, root: torch.Tensor) -> TokenTree:
        tree = TokenTree.root_only(root)
        last = [[0]] * len(root)
        for depth in range(1, self.rng.randrange(2, 6)):
            counts = [self.rng.randrange(self.width + 1) if layer else 0 for layer in last]
            width = max(counts)
            if not width:
                break
            parents = torch.tensor([[self.rng.choice(layer or [0]) for _ in range(width)] for layer in last])
            tokens = torch.randint(self.drafter.draft_vocab_size, parents.shape)
            for row, count in enumerate(counts):
                if count:  # mostly the true token, at any place, also more than once
                    tokens[row, self.rng.randrange(count)] = self.drafter.next_token(
                        state["rows"][row], state["seen"][row] + depth
                    )
                    tokens[row, self.rng.randrange(count)] = self.drafter.next_token(
                        state["rows"][row], state["seen"][row] + depth
                    )
            last = [list(range(size, size + count)) for size, count in zip(tree.sizes.tolist(), counts)]
            tree = tree.append(parents, tokens, torch.zeros(parents.shape), counts=torch.tensor(counts))
        return tree


@pytest.fixture(scope="session")
def replay() -> type[ReplayDrafter]:
    return ReplayDrafter


@pytest.fixture(scope="session")
def random_trees() -> type[RandomTrees]:
    return RandomTrees
