"""A session of rows that are decoded together, and the four steps of decoding: prefill once, then propose,
verify and update in the loop of `decode.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.inference.acceptance import AcceptanceRule, Accepted
from drafttrain.inference.proposer import Proposer
from drafttrain.target_lm.cache import TreeCache
from drafttrain.target_lm.masks import causal
from drafttrain.target_lm.model import FrozenTarget, TargetStates
from drafttrain.trees.tree import TokenTree

DRAFT_SLOTS = 64  # cache slots for the tree in flight beyond the longest output; more are added as needed
STRETCH = 2048  # tokens of a prompt in one forward
NOT_FINITE = -1  # in place of a token id: the logits for it are NaN or infinite


@dataclass
class Session:
    """Rows that are decoded together, with the target's KV cache and the proposer's state.

    Attributes:
        cache: the target's KV cache.
        state: the proposer's state.
        root: the last emitted tokens, which no forward has read yet, int64 [B]. NOT_FINITE in a row that
            cannot go on and must be dropped.
    """

    target: FrozenTarget
    proposer: Proposer
    cache: TreeCache
    state: object
    root: torch.Tensor

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep only the rows with these indices, int64 [b]; one given twice becomes two independent rows."""
        self.cache.select_rows(rows)
        self.state, self.root = self.proposer.select_rows(self.state, rows), self.root[rows]

    def append_rows(self, other: "Session") -> None:
        """Append the rows of another session."""
        self.cache.append_rows(other.cache)
        self.state = self.proposer.append_rows(self.state, other.state)
        self.root = torch.cat([self.root, other.root])


@dataclass
class Verified:
    """The result of one forward of the target over a session's trees.

    Attributes:
        tree: the trees that were verified.
        accepted: the path of each row, and the target's own token after it.
        tokens: tokens of the accepted paths, root first, int64 [B, m].
        tapped: the target's tapped hidden states on the paths, [B, m, K*H]; zeros in rows that cannot go on.
        logits: after every node, [B, n, V].
        is_harvested, is_read: the proposer's `harvest` and `update` are done; retries skip them.
    """

    tree: TokenTree
    accepted: Accepted
    tokens: torch.Tensor
    tapped: torch.Tensor
    logits: torch.Tensor
    is_harvested: bool = False
    is_read: bool = False


def prefill(
    target: FrozenTarget,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    max_len: int,
    accept: AcceptanceRule,
) -> Session:
    """Prefill prompts, padded on the right, and choose the first token of each.

    Args:
        prompts: token ids of each.
        max_len: length of the longest row when it ends, prompt included.
    """
    device, batch, n = target.device, len(prompts), max(map(len, prompts))
    cache = target.new_cache(batch, max(max_len, n) + DRAFT_SLOTS)
    state = proposer.new_state(batch, max_len + DRAFT_SLOTS)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)  # [B]
    padded = [[*prompt, *[0] * (n - len(prompt))] for prompt in prompts]
    tokens = torch.tensor(padded, device=device)  # [B, n]
    if n > STRETCH:
        from drafttrain.inference.stretches import encode_in_stretches  # only long prompts need it

        states = encode_in_stretches(target, cache, tokens, lengths, STRETCH)
    else:
        order = torch.arange(n, device=device)  # [n]
        states = target.forward(cache, tokens, order, causal(n, device))
        cache.add(lengths, n)
    rows = torch.arange(batch, device=device)  # [B]
    logits = target.head(states.final[rows, lengths - 1])[:, None]  # [B, 1, V]
    # the last prompt token is the root of a tree without drafts
    accepted = accept(TokenTree.root_only(tokens[rows, lengths - 1]), logits)
    root, tapped = choose_root(cache, accepted, logits, states.tapped)
    proposer.update(state, tokens, tapped, lengths)
    return Session(target, proposer, cache, state, root)


def propose(session: Session) -> TokenTree:
    """Return the proposer's trees after the session's last tokens."""
    return session.proposer.propose(session.state, session.root)


def verify(session: Session, tree: TokenTree, accept: AcceptanceRule) -> Verified:
    """Run the target over trees, commit the accepted paths to its cache, and set the roots after them."""
    session.cache.reserve(tree.width)
    states = session.target.forward(session.cache, tree.tokens, tree.depths, tree.ancestors())
    return judge(session, tree, accept, states, session.target.head(states.final))


def update(session: Session, verified: Verified) -> None:
    """Update the proposer with what the target has verified."""
    session.proposer.harvest(session.state, verified.tree, verified.logits)
    session.proposer.update(session.state, verified.tokens, verified.tapped, verified.accepted.counts)


def judge(
    session: Session, tree: TokenTree, accept: AcceptanceRule, states: TargetStates, logits: torch.Tensor
) -> Verified:
    """Accept paths by the target's logits [B, n, V], commit them to the cache, and set the next roots."""
    accepted = accept(tree, logits)
    session.cache.commit(accepted.path, accepted.counts)
    tokens = tree.tokens.gather(1, accepted.path)  # [B, m]
    wide_path = accepted.path[:, :, None].expand(-1, -1, states.tapped.shape[-1])  # [B, m, K*H]
    tapped = states.tapped.gather(1, wide_path)  # [B, m, K*H]
    session.root, tapped = choose_root(session.cache, accepted, logits, tapped)
    return Verified(tree, accepted, tokens, tapped, logits)


def choose_root(
    cache: TreeCache, accepted: Accepted, logits: torch.Tensor, tapped: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token after each row's path, int64 [B], and the tapped states [B, m, K*H].

    Where the logit of that token, of [B, n, V], is not finite, the token is NOT_FINITE, and the row's cache
    and tapped states become zeros: NaN there would reach later sequences.
    """
    # the chosen token's logit is enough: the maximum is NaN if any logit is
    if logits.device.type == "cpu":  # single numbers take less time than tensors of them
        found = (accepted.path.tolist(), accepted.counts.tolist(), accepted.next_token.tolist())
        places = ((row, path[count - 1], token) for row, (path, count, token) in enumerate(zip(*found)))
        if all(math.isfinite(logits[place]) for place in places):
            return accepted.next_token, tapped
    last = accepted.path.gather(1, accepted.counts[:, None] - 1)  # [B, 1]
    places = last * logits.shape[2] + accepted.next_token[:, None]  # [B, 1] among all of a row
    finite = logits.flatten(1).gather(1, places)[:, 0].isfinite()  # [B]
    if finite.all():
        return accepted.next_token, tapped
    broken = ~finite  # [B]
    cache.clear_rows(broken)
    return accepted.next_token.masked_fill(broken, NOT_FINITE), tapped.masked_fill(broken[:, None, None], 0)
