"""Trees in flight and static trees grown against known texts, prompt by prompt: what they hit, and the work
of each timestep, from which times are simulated. Every prompt is written to a file of JSON lines at once.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafttrain.data.prompts import Prompt
from drafttrain.drafters.model import DraftModel
from drafttrain.inference.decode import decode_all
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer
from drafttrain.pipeline.outlook import STATIC, KnownText, encoded
from drafttrain.pipeline.prediction import follows_prompt
from drafttrain.pipeline.replay import Timestep, Trace, replay, replay_policy, replay_static
from drafttrain.pipeline.simulate import Machines, pipedec_jobs, pp_jobs, run, stpp_jobs, total_seconds
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint
from drafttrain.utils.writing import write_json
from studies.resuming import whole_lines
from studies.seed.pairs import Pair

GREEDY = SamplingParams()
IN_FLIGHT = ("flight", "best_first")
EAGLE_SHAPES, EAGLE_NODES = ((8, 4), (8, 6), (8, 8), (4, 8), (4, 12)), 31  # top-k and depth; of all layers


@dataclass
class Counted:
    """The trees of one text.

    Attributes:
        kind: "flight", "best_first" (a `BestFirstTree` in flight), "static" with `groups` layers, or
            "eagle2" with as many, `width` expanded nodes of a layer and `children` nodes in all.
        seed: of the text's draws; None: it is greedy.
        groups, width, children: of the trees.
        tokens: of the text, without the first.
        hits: of them, and of the first if it was looked for, in the trees.
        rounds: of trees in flight, for each timestep [nodes of each drafting step, nodes of each group,
            tokens, hits]; of static ones, for each tree [nodes of each drafting step, verified nodes].
        follows: whether a tree in flight follows the prompt: the first token is looked for, and the first
            timesteps, one fewer than groups, are beside the prompt.
        judged: tokens that were looked for in static trees; None: of trees in flight, where it follows from
            the number of tokens, and of an earlier version.
        limit: most tokens that the text could have had; None: of an earlier version.
    """

    task: str
    prompt: str
    kind: str
    seed: int | None
    groups: int
    width: int
    children: int
    tokens: int
    hits: int
    rounds: list[list[Any]]
    follows: bool = False
    judged: int | None = None
    limit: int | None = None

    @property
    def looked_for(self) -> int:
        """Return how many tokens were looked for in the trees; in trees in flight not the last, and the first
        only if they follow the prompt."""
        return max(self.tokens + self.follows - 1, 0) if self.kind in IN_FLIGHT else self.judged

    @property
    def shape(self) -> tuple[str, int | None, int, int, int]:
        """Return what was grown."""
        return self.kind, self.seed, self.groups, self.width, self.children

    def trace(self) -> Trace:
        """Return the timesteps of trees in flight."""
        steps, beside = [Timestep(*one) for one in self.rounds], self.groups - 1 if self.follows else 0
        return Trace(steps[beside:], steps[:beside])


Shape = tuple[str, int | None, int, int, int]  # kind, seed, groups, width, children


def flights(
    groups: Iterable[int], width: int, children: int, seed: int | None = None, best_first: bool = False
) -> list[Shape]:
    """Return trees in flight through different numbers of groups."""
    return [(IN_FLIGHT[best_first], seed, n, width, children) for n in groups]


def statics(children: int, seed: int | None = None) -> list[Shape]:
    """Return the static trees of which STPP takes the fastest."""
    return [("static", seed, depth, width, children) for width, depth in STATIC]


def eagles(seed: int | None = None) -> list[Shape]:
    """Return EAGLE-2's trees, of which one is chosen on tuning prompts."""
    return [("eagle2", seed, depth, top_k, EAGLE_NODES) for top_k, depth in EAGLE_SHAPES]


def texts(
    pair: Pair, tasks: Mapping[str, Sequence[Prompt]], new_tokens: int, sampling: SamplingParams, path: Path
) -> dict[tuple[str, str], KnownText]:
    """Decode prompts with the target; the answers that a file has are taken from there.

    Returns:
        texts by task and prompt.

    Raises:
        UserError: the file, beside which the counts are, is of another target or drafter, of other prompts of
            these names, or of other settings.
    """
    made_by = fingerprint([pair.target.fingerprint, new_tokens, asdict(sampling)])
    prompts = {(name, p.id): p.token_ids(pair.target.tokenizer) for name, ps in tasks.items() for p in ps}
    asked = {"/".join(name): fingerprint(ids) for name, ids in prompts.items()}
    stored = {"made_by": made_by, "drafter": pair.source, "prompts": {}, "answers": []}
    if path.exists():
        stored |= {"prompts": asked} | json.loads(path.read_text())  # once they were not recorded
    if stored["made_by"] != made_by or len(stored["answers"]) != len(stored["prompts"]):
        raise UserError(f"{path}: must be of this target and these settings, got others; name another folder")
    if stored["drafter"] != pair.source or any(stored["prompts"].get(k, v) != v for k, v in asked.items()):
        raise UserError(f"{path}: must be of this drafter and these prompts, got others; name another folder")
    answers = dict(zip(stored["prompts"], stored["answers"]))
    if missing := [ids for name, ids in zip(asked, prompts.values()) if name not in answers]:
        draws = [sampling] * len(missing)
        found, _ = decode_all(pair.target, NoProposer(), missing, new_tokens, sampling=draws)
        answers |= dict(zip([name for name in asked if name not in answers], found, strict=True))
        known = stored["prompts"] | asked
        write_json(path, stored | {"prompts": known, "answers": [answers[name] for name in known]})
    taps = getattr(pair.drafter.config, "tapped_blocks", [])
    texts = encoded(pair.target, taps, prompts.values(), [answers[name] for name in asked], new_tokens)
    return dict(zip(prompts, texts, strict=True))


def count(
    drafter: DraftModel,
    known: Mapping[tuple[str, str], KnownText],
    shapes: Sequence[Shape],
    raw: Path,
    note: Callable[[str], None] = lambda line: None,
) -> list[Counted]:
    """Grow trees of all shapes against all texts; those that the file has are not grown again. The nodes of
    layers in flight that a miss discards are estimated (`skip_lost` of `replay`)."""
    found = [Counted(**json.loads(line)) for line in whole_lines(raw)]
    found = [one for one in found if one.follows == _follows(one.kind, known.get((one.task, one.prompt)))]
    limits = {name: text.limit for name, text in known.items()}
    found = [one for one in found if one.limit == limits.get((one.task, one.prompt))]
    done = {(one.task, one.prompt, one.shape) for one in found}
    wanted = [(name, shape) for shape in shapes for name in known if (*name, shape) not in done]
    with open(raw, "a", encoding="utf-8") as file:
        for i, (name, shape) in enumerate(wanted):
            one = _grow(drafter, known[name], name, shape)
            found.append(one)
            file.write(json.dumps(asdict(one)) + "\n")
            file.flush()
            note(f"{i + 1} of {len(wanted)}: {'/'.join(name)}, {shape}")
    kept = {(*name, shape) for name in known for shape in shapes}
    return [one for one in found if (one.task, one.prompt, one.shape) in kept]


def _follows(kind: str, text: KnownText | None) -> bool:
    """Return whether trees of a kind follow the prompt; they once did not."""
    return kind in IN_FLIGHT and text is not None and follows_prompt(text.tapped.shape[1] > 0, text.prompt)


def _grow(drafter: DraftModel, text: KnownText, name: tuple[str, str], shape: Shape) -> Counted:
    kind, _, groups, width, children = shape
    known, tokens = (text.prompt, text.answer, text.tapped), len(text.answer) - 1
    if kind not in IN_FLIGHT:
        if kind == "static":
            rounds = replay_static(drafter, *known, groups, width, children)
        else:
            rounds = replay_policy(drafter, *known, Eagle2Policy(width, groups, children))
        hits = sum(one.hits for one in rounds)
        judged, sizes = sum(one.judged for one in rounds), [[one.drafted, one.nodes] for one in rounds]
        return Counted(*name, *shape, tokens, hits, sizes, judged=judged, limit=text.limit)
    is_best = kind == "best_first"
    how = {"skip_lost": not is_best, "best_first": is_best, "limit": text.limit}
    trace = replay(drafter, *known, groups, width, children, **how)
    steps = [[step.drafted, step.nodes, step.tokens, step.hits] for step in (*trace.beside, *trace.steps)]
    return Counted(*name, *shape, tokens, trace.hits, steps, _follows(kind, text), limit=text.limit)


def hit_rate(rows: Sequence[Counted], shape: Shape) -> float:
    """Return the share of the tokens looked for in the trees of a shape that were there."""
    chosen = [one for one in rows if one.shape == shape]
    return sum(one.hits for one in chosen) / max(sum(one.looked_for for one in chosen), 1)


def nodes_each(rows: Sequence[Counted], shape: Shape) -> float:
    """Return the mean number of nodes of a static tree without its root, or that the groups hold in a
    timestep."""
    chosen = [one for one in rows if one.shape == shape]
    if shape[0] not in IN_FLIGHT:
        sizes = [nodes - 1 for one in chosen for _, nodes in one.rounds]
    else:
        sizes = [sum(step.nodes) for one in chosen for step in one.trace().steps]
    return sum(sizes) / max(len(sizes), 1)


def equal_nodes(
    rows: list[Counted], flight: Shape, children: int, grown: Callable[[Shape], list[Counted]]
) -> Shape:
    """Return the static tree, with as many layers as the tree in flight, whose width gives it as many nodes
    or a few more. Its rows, and those of narrower trees that are tried, are added to `rows`.

    Args:
        grown: grows trees of a shape against the same texts.
    """
    _, seed, groups, _, _ = flight
    wanted, before = nodes_each(rows, flight), 0.0
    width = max(1, round(wanted / groups))
    while True:
        shape = "static", seed, groups, width, children
        rows += grown(shape)
        if (nodes := nodes_each(rows, shape)) >= wanted or nodes <= before:  # or no wider tree is possible
            return shape
        # trees at the end of a text have fewer layers
        before, width = nodes, max(width + 1, round(width * wanted / nodes))


def seconds(
    rows: Sequence[Counted], mode: str, shape: Shape, machines: Machines
) -> dict[tuple[str, str], float]:
    """Return the simulated seconds per token of each text in a mode.

    Args:
        shape: of the trees; for `pp` any that was grown against the texts.
    """
    found = {}
    for one in rows:
        if one.shape != shape or not one.tokens:
            continue
        if mode == "pp":
            jobs = pp_jobs(machines, one.tokens)
        elif mode == "stpp":
            jobs = stpp_jobs(machines, [tuple(each) for each in one.rounds])
        else:
            jobs = pipedec_jobs(machines, one.trace())
        found[one.task, one.prompt] = total_seconds(run([jobs])) / one.tokens
    return found


def best_static(rows: Sequence[Counted], shapes: Sequence[Shape], machines: Machines) -> Shape:
    """Return the static tree that is the fastest on these machines over all texts."""
    return min(shapes, key=lambda shape: sum(seconds(rows, "stpp", shape, machines).values()))
