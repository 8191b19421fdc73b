"""The steps of `session.py` for several sessions of one row each: they run in one forward, and each session
keeps its own cache, length and state.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from drafttrain.inference.acceptance import AcceptanceRule
from drafttrain.inference.proposer import Proposer
from drafttrain.inference.session import Session, Verified, judge, propose
from drafttrain.target_lm.cache import TreeCache
from drafttrain.target_lm.model import FrozenTarget, TargetStates
from drafttrain.trees.lists import rows_of
from drafttrain.trees.tree import TokenTree


def propose_many(
    sessions: Sequence[Session], seeds: Sequence[int], positions: Sequence[int]
) -> list[TokenTree]:
    """Draft trees for one-row sessions with twins of one proposer, together if it can join their states.

    Args:
        seeds, positions: of each sequence, as `Proposer.set_active` takes them.
    """
    proposer, states = sessions[0].proposer, [session.state for session in sessions]
    if len(sessions) == 1 or (joined := proposer.join(states)) is None:
        trees = []
        for session, seed, position in zip(sessions, seeds, positions, strict=True):
            session.proposer.set_active([seed], [position])
            trees.append(propose(session))
        return trees
    proposer.set_active(seeds, positions)
    try:
        trees = proposer.propose(joined, torch.cat([session.root for session in sessions]))
    finally:  # after an error, too, so that states keep what was read before it
        proposer.split(joined, states)
    return rows_of(trees)


def run_target_many(
    sessions: Sequence[Session], trees: Sequence[TokenTree]
) -> list[tuple[TargetStates, torch.Tensor]]:
    """Return the target's states and logits [1, n, V] at the nodes of each session's tree, each with its own
    cache and length, in one forward without padding to the widest."""
    target = sessions[0].target
    if len(sessions) == 1:
        cache, [tree] = sessions[0].cache, trees
        cache.reserve(tree.width)
        found = target.forward(cache, tree.tokens, tree.depths, tree.ancestors())
        return [(found, target.head(found.final))]
    states = target.forward_many(*zip(*nodes_of(sessions, trees)))
    return list(zip(states, heads(target, [one.final for one in states])))


def nodes_of(
    sessions: Sequence[Session], trees: Sequence[TokenTree]
) -> list[tuple[TreeCache, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return cache, tokens, depths and ancestors of each session's tree, as `FrozenTarget.forward_many` takes
    them, with room for the tree in the cache."""
    for session, tree in zip(sessions, trees, strict=True):
        session.cache.reserve(tree.width)
    return [
        (session.cache, tree.tokens, tree.depths, tree.ancestors()) for session, tree in zip(sessions, trees)
    ]


def heads(target: FrozenTarget, finals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return logits [..., V] of several final states [..., H], by one product."""
    rows = [final.flatten(0, -2) for final in finals]  # [n, H] each
    parts = target.head(torch.cat(rows)).split([len(row) for row in rows])  # [n, V] each
    return [part.view(*final.shape[:-1], -1) for part, final in zip(parts, finals)]


def judge_many(
    sessions: Sequence[Session],
    trees: Sequence[TokenTree],
    accept: Sequence[AcceptanceRule],
    outputs: Sequence[tuple[TargetStates, torch.Tensor]],
) -> list[Verified]:
    """Compare the tree of each session with the target's outputs, as `judge` does for one."""
    return [judge(*given, *output) for *given, output in zip(sessions, trees, accept, outputs, strict=True)]


def update_many(sessions: Sequence[Session], verified: Sequence[Verified]) -> None:
    """Update the proposer of several one-row sessions with what the target has verified.

    May be called again after an error, for all sessions or some: no state is updated twice.
    """
    for session, one in zip(sessions, verified):
        if not one.is_harvested:
            session.proposer.harvest(session.state, one.tree, one.logits)
            one.is_harvested = True
    unread = [number for number, one in enumerate(verified) if not one.is_read]
    if not unread:
        return

    def note(number: int) -> None:
        verified[unread[number]].is_read = True

    read_many(
        sessions[0].proposer,
        [sessions[number].state for number in unread],
        [verified[number].tokens for number in unread],
        [verified[number].tapped for number in unread],
        [verified[number].accepted.counts for number in unread],
        note,
    )


def read_many(
    proposer: Proposer,
    states: Sequence[object],
    tokens: Sequence[torch.Tensor],
    tapped: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
    on_read: Callable[[int], None] = lambda number: None,
) -> None:
    """Update several one-row states with verified tokens, together unless the proposer `reads_alone`.

    Args:
        tokens, tapped, counts: of each state, as `Proposer.update` takes them.
        on_read: called with the index of each state that has been updated.
    """
    if len(states) == 1 or proposer.reads_alone or (joined := proposer.join(states)) is None:
        for number, each in enumerate(zip(states, tokens, tapped, counts)):
            proposer.update(*each)
            on_read(number)
        return
    m = max(one.shape[1] for one in tokens)
    rows = torch.cat([F.pad(one, (0, m - one.shape[1])) for one in tokens])  # [B, m]
    wide = torch.cat([F.pad(one, (0, 0, 0, m - one.shape[1])) for one in tapped])  # [B, m, K*H]
    try:
        proposer.update(joined, rows, wide, torch.cat(list(counts)))
        for number in range(len(states)):
            on_read(number)
    finally:  # as in `propose_many`
        proposer.split(joined, states)
