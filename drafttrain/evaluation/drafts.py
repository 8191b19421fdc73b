"""Record each draft that a decode reached, and the target's token in its place, for `diagnosis.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from drafttrain.drafters.model import DraftModel
from drafttrain.inference.acceptance import AcceptanceRule, Accepted, accept_greedy
from drafttrain.inference.decode import decode
from drafttrain.inference.proposer import TreeProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.label_loss import draft_ids
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.tree import TokenTree


@dataclass
class Draft:
    """A drafted token that was reached: all drafts before it in its chain were accepted.

    Attributes:
        prompt: number of the prompt.
        depth: in its chain, from 1.
        position: of its token in the answer, from 0.
        context: tokens before it, the prompt included.
        accepted: whether the target takes it.
        wanted: the target's token there.
        before: the answer up to it.
        text: of the target's token.
        probability: that the drafter gave its own token.
        rank: of the target's token among the drafter's, from 0; None where it cannot be drafted.
        kl: from the target's distribution to the drafter's, both within the draft vocabulary, nats.
        outside: probability of the target outside the draft vocabulary.
    """

    prompt: int
    depth: int
    position: int
    context: int
    accepted: bool
    wanted: int
    before: str
    text: str
    probability: float
    rank: int | None
    kl: float
    outside: float


@dataclass
class NotingChain(ChainPolicy):
    """Chain policy that records the drafter's distribution of each draft.

    Attributes:
        noted: log-probabilities of the last chain's drafts, fp32 [D] each.
    """

    noted: list[torch.Tensor] = field(default_factory=list, repr=False)

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft a chain after the root token [1]."""
        self.noted, tree = [], TokenTree.root_only(root)
        for depth in range(self.length):
            last = torch.full_like(root, depth)[:, None]  # [1, 1] node index
            expanded = drafter.expand(state, tree, last)  # [1, 1, D]
            self.noted.append(expanded[0, 0])
            log_probs, ids = expanded.max(-1)  # [1, 1]
            tree = tree.append(last, drafter.to_target(ids), log_probs)
        return tree


class NotingRule(AcceptanceRule):
    """Greedy acceptance rule that records the last tree, its logits [1, n, V] and what was accepted of it."""

    tree: TokenTree
    logits: torch.Tensor
    accepted: Accepted

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        self.tree, self.logits, self.accepted = tree, logits, accept_greedy(tree, logits)
        return self.accepted


def tried_drafts(
    target: FrozenTarget,
    drafter: DraftModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    new_tokens: int,
    stats: DecodeStats | None = None,
) -> list[Draft]:
    """Decode prompts greedily with chains and return the drafts that were reached.

    Args:
        prompts: token ids of each.
        length: of the chains.
        stats: counts and times of the decode are added to it.

    Raises:
        UserError: as `decode`.
    """
    policy, rule, found = NotingChain(length), NotingRule(), []
    proposer = TreeProposer(drafter, policy)
    ids, places = drafter.draft_to_target, draft_ids(drafter, target.vocab_size)  # [D], [V]
    for number, prompt in enumerate(prompts):
        answer: list[int] = []
        for step in decode(target, proposer, [list(prompt)], new_tokens, accept=rule, stats=stats):
            [emitted], [reason] = step.tokens, step.finish_reason
            # the first step encodes the prompt, and at the end of an answer chains are shorter
            tried = min(rule.tree.tokens.shape[1] - 1, len(emitted)) if answer else 0
            for i in range(tried):
                q = policy.noted[i].float()  # [D]
                p = rule.logits[0, i].float()  # [V]
                wanted = emitted[i]
                index = int(places[wanted])
                inside = torch.log_softmax(p[ids], -1)  # [D]
                before, after = (target.tokenizer.decode([*answer, *emitted[:n]]) for n in (i, i + 1))
                # decoded in context: some tokenizers drop the space before a word that is decoded alone
                text = after[len(before) :] if after.startswith(before) else ""
                found.append(
                    Draft(
                        prompt=number,
                        depth=i + 1,
                        position=len(answer) + i,
                        context=len(prompt) + len(answer) + i,
                        accepted=int(rule.tree.tokens[0, i + 1]) == wanted,
                        wanted=wanted,
                        before=before,
                        text=text or target.tokenizer.decode([wanted]),
                        probability=float(q.max().exp()),
                        rank=None if index < 0 else int((q > q[index]).sum()),
                        kl=float((inside.exp() * (inside - q)).nan_to_num(0.0).sum()),
                        outside=max(1 - float(torch.softmax(p, -1)[ids].sum()), 0.0),
                    )
                )
            answer += emitted
            if reason:
                break
    return found
