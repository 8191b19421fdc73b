"""How few draft tokens a judge could verify that also knows the drafter's own hidden state.

    python -m studies.c2t.states --limit 176

Beside the features of `trees/c2t.py` a network reads the head's input at a node's parent, from which the
drafter predicted the node (state), and the node's own embedding (token). The measure is that of
`studies.c2t.features`: nodes that a judge takes per tree, over those that joint probability takes for as many
accepted ones. A third of the prompts judges, the others teach, and a tenth of their trees chooses the epoch.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.classifier.data import Rows
from drafttrain.classifier.dump import label_trees
from drafttrain.data.prompts import read_prompts
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.trees.features import FEATURES
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError
from drafttrain.utils.progress import counted
from drafttrain.utils.writing import write_json
from studies.arguments import run, start
from studies.c2t.features import ACCEPTED, LEAST, chain_nodes, summary, taken

PROMPTS = "data/heldout_prompts.jsonl"
TOP_K, DEPTH = 10, 11  # of the trees, as `drafttrain c2t` grows them
AT_ONCE = 8  # prompts
SETS: dict[str, tuple[str, ...]] = {
    ",".join(FEATURES): (),
    "the same, state": ("state",),
    "the same, state, token": ("state", "token"),
}
PROBABILITIES = ("P", "p")  # whose logarithms a network reads
WIDTHS = (48, 256)  # hidden units
SEEDS = (0, 1, 2)
EPOCHS, BATCH, RATE, DECAY = 12, 1024, 1e-3, 0.05


@dataclass
class Known:
    """Nodes of trees, and what is known of them beside their features.

    Attributes:
        prompt: of each node, [N].
        parent: row of each node's parent, -1 for the root, [N].
        state: number of the state of each node's parent, [N].
        states: head's inputs at parents, fp16 [S, H].
        token: of each node, [N].
    """

    rows: Rows
    prompt: np.ndarray
    parent: np.ndarray
    state: np.ndarray
    states: torch.Tensor
    token: np.ndarray


@torch.no_grad()
def known_nodes(bundle: Bundle, prompts: Sequence[Sequence[int]], new_tokens: int) -> Known:
    """Grow and label trees after the target's own answers to prompts; keep the nodes worth looking at."""
    parts: list[dict[str, np.ndarray]] = []
    states: list[torch.Tensor] = []
    trees = kept = nodes = 0
    with bundle.target.own_cores(), counted("growing trees", len(prompts), "prompts") as advance:
        for first in range(0, len(prompts), AT_ONCE):
            some = prompts[first : first + AT_ONCE]
            for row, tree, accepted, parents, outputs in _grown(bundle, some, new_tokens):
                part, used = _nodes(tree, row, accepted, parents, outputs)
                part |= {
                    "tree": np.full(len(part["d"]), trees),
                    "prompt": np.full(len(part["d"]), first + row),
                }
                part["state"] += kept
                part["parent"] = np.where(part["parent"] < 0, -1, part["parent"] + nodes)
                nodes += len(part["d"])
                parts.append(part)
                states.append(used)
                trees, kept = trees + 1, kept + len(used)
            advance(len(some))
    if not parts:
        raise UserError("--prompts: the target's answers must have a token to draft after, got none")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    x = np.stack([columns[name] for name in FEATURES], 1).astype(np.float32)  # [N, F]
    rows = Rows(x, columns["P"], columns["accepted"], columns["tree"], columns["d"].astype(np.int8))
    return Known(
        rows, columns["prompt"], columns["parent"], columns["state"], torch.cat(states), columns["token"]
    )


def _grown(
    bundle: Bundle, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Iterator[tuple[int, TokenTree, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield each tree that decoding prompts comes to: its row, the trees of all rows, which nodes are
    accepted [B, n], the nodes that were expanded [B, f], ascending, and the head's inputs at them [B, f, H].
    """
    target, drafter = bundle.target, bundle.drafter
    outputs, _ = decode_all(target, NoProposer(), prompts, new_tokens + DEPTH)
    texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs)]
    width = max(map(len, texts))
    tokens = torch.tensor([text + [-1] * (width - len(text)) for text in texts])  # [B, T]
    starts = torch.tensor([len(prompt) for prompt in prompts])  # [B]
    ends = [min(new_tokens, len(one) - (one[-1] in target.eos_token_ids)) for one in outputs]
    tapped = target.encode(tokens.clamp(min=0), torch.zeros_like(tokens)).tapped  # [B, T, K·H]
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    keep = drafter.keep_outputs

    def note(state: object, frontier: torch.Tensor, inputs: torch.Tensor) -> None:
        layers.append((frontier, inputs.half()))
        keep(state, frontier, inputs)

    drafter.keep_outputs = note
    try:
        found = label_trees(drafter, tokens, tapped, starts, starts + torch.tensor(ends), TOP_K, DEPTH)
        for tree, accepted, _, active in found:
            parents, inputs = (torch.cat(each, 1) for each in zip(*layers))  # [B, f], [B, f, H]
            layers.clear()
            for row in active.nonzero()[:, 0].tolist():
                yield row, tree, accepted, parents, inputs
    finally:
        del drafter.keep_outputs


def _nodes(
    tree: TokenTree, row: int, accepted: torch.Tensor, parents: torch.Tensor, inputs: torch.Tensor
) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """Return columns of the nodes of a row's tree that are worth looking at, and the states of their parents,
    by which `state` counts."""
    joint = tree.joint_log_probs()[row].exp()  # [n]
    nodes = (joint > LEAST).nonzero()[1:, 0]  # without the root; all ancestors are among them
    place = torch.searchsorted(parents[row], tree.parents[row, nodes])  # [N] among those expanded
    used, state = place.unique(return_inverse=True)
    above = tree.parents[row, nodes]  # [N]
    siblings = torch.arange(tree.width) - 1
    columns = {
        "P": joint[nodes],
        "H": tree.entropies[row, nodes],
        "d": tree.depths[row, nodes],
        "p": tree.log_probs[row, nodes].exp(),
        "rank": (siblings % TOP_K)[nodes],
        "accepted": accepted[row, nodes],
        "token": tree.tokens[row, nodes],
        "parent": torch.where(above == 0, -1, torch.searchsorted(nodes, above)),
        "state": state,
    }
    return {name: values.numpy() for name, values in columns.items()}, inputs[row, used]


class Judge(nn.Module):
    """A network of one hidden layer over features and, in parts of their own, states and embeddings."""

    def __init__(self, numbers: torch.Tensor, parts: int, size: int, width: int):
        super().__init__()
        self.register_buffer("mean", numbers.mean(0))
        self.register_buffer("std", numbers.std(0).clamp(min=1e-6))
        self.first = nn.Linear(numbers.shape[1], width)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(size), nn.Linear(size, width, bias=False)) for _ in range(parts)
        )
        self.last = nn.Linear(width, 1)

    def forward(self, numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return log-odds of acceptance [N] of features [N, F] and vectors [N, H] of each part."""
        hidden = self.first((numbers - self.mean) / self.std)  # [N, w]
        for layer, part in zip(self.parts, parts):
            hidden = hidden + layer(part)
        return self.last(torch.relu(hidden))[:, 0]


def judged(known: Known, embeddings: torch.Tensor, which: Sequence[str], width: int, seed: int) -> np.ndarray:
    """Teach a network by the prompts that do not judge; return its log-odds of all nodes [N].

    Args:
        embeddings: of tokens [V, H].
        which: vectors that it reads beside the features: state, token.
    """
    torch.manual_seed(seed)
    numbers, labels = torch.from_numpy(known.rows.x), torch.from_numpy(known.rows.accepted).float()
    numbers = torch.where(torch.tensor([name in PROBABILITIES for name in FEATURES]), numbers.log(), numbers)
    sources = {
        "state": (known.states, torch.from_numpy(known.state)),
        "token": (embeddings, torch.from_numpy(known.token)),
    }

    def vectors(rows: torch.Tensor) -> list[torch.Tensor]:
        return [table[index[rows]].float() for table, index in (sources[name] for name in which)]

    teaches = known.prompt % 3 != 0
    chooses = teaches & (known.rows.tree % 10 == 0)
    training, choosing = (torch.from_numpy(np.flatnonzero(x)) for x in (teaches & ~chooses, chooses))
    judge = Judge(numbers[training], len(which), embeddings.shape[1], width)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=RATE, weight_decay=DECAY)
    loss_of = nn.functional.binary_cross_entropy_with_logits

    @torch.no_grad()
    def odds(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([judge(numbers[part], vectors(part)) for part in rows.split(1 << 14)])

    best, kept = np.inf, None
    for _ in range(EPOCHS):
        for batch in training[torch.randperm(len(training))].split(BATCH):
            loss = loss_of(judge(numbers[batch], vectors(batch)), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if (loss := float(loss_of(odds(choosing), labels[choosing]))) < best:
            best, kept = loss, odds(torch.arange(len(labels))).numpy()
    return kept


def with_ancestors(score: np.ndarray, known: Known) -> np.ndarray:
    """Return the least score of each node and its ancestors [N]: no node is taken without them."""
    least = score.copy()
    for depth in np.unique(known.rows.depth):
        nodes = np.flatnonzero((known.rows.depth == depth) & (known.parent >= 0))
        least[nodes] = np.minimum(least[nodes], least[known.parent[nodes]])
    return least


def compare(known: Known, embeddings: torch.Tensor) -> dict[str, dict[str, object]]:
    """Return ratios to joint probability, for trees and chains, by what a judge reads and its width."""
    rows, judging = known.rows, known.prompt % 3 == 0
    kinds = {"trees": np.ones(len(rows), bool), "chains": chain_nodes(rows)}
    trees = len(np.unique(rows.tree[judging]))
    ratios: dict[str, dict[str, list[np.ndarray]]] = {kind: {} for kind in kinds}
    bases, found = {}, {}
    for kind, among in kinds.items():
        mine = rows.take(judging & among)
        at = ACCEPTED[kind][ACCEPTED[kind] <= mine.accepted.sum() / trees]
        if not len(at) or not rows.accepted[~judging].any():
            raise UserError("--limit: too few accepted nodes to judge by; take more prompts")
        bases[kind] = at, taken(mine.joint, mine.accepted, trees, at)
        found[kind] = {"joint probability": {"nodes": bases[kind][1].tolist(), "at": at.tolist()}}
    for name, which in SETS.items():
        for width in WIDTHS:
            for seed in SEEDS:
                score = with_ancestors(judged(known, embeddings, which, width, seed), known)
                for kind, among in kinds.items():
                    mine, (at, base) = judging & among, bases[kind]
                    ratio = taken(score[mine], rows.accepted[mine], trees, at) / base
                    ratios[kind].setdefault(f"{name}; {width} units", []).append(ratio)
            for kind in kinds:
                one = ratios[kind][f"{name}; {width} units"]
                found[kind][f"{name}; {width} units"] = summary(np.mean(one, 0), one)
                print(f"{kind}: {name}; {width} units: {np.mean(one):.3f}", flush=True)
    return found


def study(args: Namespace) -> None:
    """Compare judges on trees after --prompts."""
    bundle = load_bundle(args.bundle, args.target, args.dtype)
    prompts = read_prompts(args.prompts, args.limit)
    tokens = [prompt.token_ids(bundle.target.tokenizer) for prompt in prompts]
    known = known_nodes(bundle, tokens, args.new_tokens)
    sizes = {"prompts": len(prompts), "trees": int(known.rows.tree[-1]) + 1, "nodes": len(known.rows)}
    print(", ".join(f"{n} {name}" for name, n in sizes.items()), flush=True)
    found = compare(known, bundle.target.embed.weight.float())
    write_json(args.out / "states.json", {"size": sizes, "max_new_tokens": args.new_tokens, **found})


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; return the exit status."""
    names = ("bundle", "target", "prompts", "limit", "new_tokens", "dtype")
    return run(study, __doc__, argv, names, out="runs/c2t", prompts=PROMPTS, new_tokens=160)


if __name__ == "__main__":
    start(main)
