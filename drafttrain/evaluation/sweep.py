"""Count verified tokens against accept_len of any growth policies on any prompts (C2T paper, Figure 4).

A family is the part of a policy's text before the colon; its settings give the points. Families are compared
at equal accept_len, along their Pareto fronts. `drafttrain report --sweep` draws the points.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.bundle_files import SELF_DRAFT
from drafttrain.data.chat import template_hash, tokenizer_hash
from drafttrain.data.config import PromptSet
from drafttrain.data.prompts import Task
from drafttrain.evaluation.measure import check_lengths
from drafttrain.evaluation.methods import costs_of
from drafttrain.evaluation.proposers import find_drafter
from drafttrain.inference.decode import decode
from drafttrain.inference.stats import DecodeStats
from drafttrain.kernels.machine import describe_machine, dtype_name
from drafttrain.target_lm.model import weights_hash
from drafttrain.trees.parse import takes_classifier
from drafttrain.trees.policies import drafter_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.folders import make_out
from drafttrain.utils.progress import counted
from drafttrain.utils.provenance import content_hash, git_commit, versions
from drafttrain.utils.writing import write_json, write_text

GRID = 101  # values of accept_len over which a ratio is averaged
FIXED = (0.25, 0.5, 0.75)  # positions in the common range at which a ratio is also reported by itself
RESAMPLES = 1000  # of the prompts, for intervals


@dataclass
class Point:
    """One policy on all prompts.

    Attributes:
        tree: the policy as text.
        accept_len: tokens emitted per target forward, the target's own token included.
        verify_per_step: draft tokens sent to the target per forward, root excluded.
        verify_tokens, steps, new_tokens: the counts.
        accept_len_nonrepeated: accept_len outside repeated 4-grams; None if there are no such tokens.
        repetition: share of emitted tokens in them.
        tokens_per_second: prefill included; policies are not interleaved, so only a hint. 0: not timed,
            because several prompts were decoded at a time.
        by_prompt: tokens emitted by steps, steps and verified tokens of each prompt; none in older files.
    """

    tree: str
    accept_len: float
    verify_per_step: float
    verify_tokens: int
    steps: int
    new_tokens: int
    accept_len_nonrepeated: float | None
    repetition: float
    tokens_per_second: float
    by_prompt: list[list[int]] = field(default_factory=list)

    @property
    def family(self) -> str:
        """Return the part of the policy's text before its settings."""
        return self.tree.partition(":")[0]


@dataclass
class Comparison:
    """Verified tokens of one family divided by those of the reference, at equal accept_len.

    Attributes:
        family: its name.
        low, high: common range of accept_len.
        mean: mean ratio over it.
        at: ratio at some values of accept_len.
        interval: 95 % confidence interval of the mean: percentile bootstrap over prompts, with new fronts in
            each resample. None: the counts of single prompts are not known, or there is only one.
    """

    family: str
    low: float
    high: float
    mean: float
    at: dict[float, float]
    interval: list[float] | None = None


def sweep(
    bundle: str | os.PathLike,
    prompts: PromptSet,
    trees: Sequence[str],
    out: str | os.PathLike,
    reference: str = "eagle2",
    max_new_tokens: int = 96,
    target: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    calibration: str | os.PathLike | None = None,
    classifier: str | os.PathLike | None = None,
    rows: int = 1,
) -> tuple[list[Point], list[Comparison]]:
    """Decode all prompts greedily with every policy; write `points.jsonl`, `comparison.jsonl`, `sweep.json`
    (machine and versions) and the counts of each policy to `measurements/`, where an interrupted or longer
    sweep continues with the same versions and, where it is timed, on the same machine.

    Args:
        trees: growth policies, `ngram` or `ngram+POLICY`.
        reference: family that the others are compared with.
        target, dtype, device: as for `load_bundle`.
        calibration: for `pct`, `timed` and `c2t`; None for the bundle's own.
        classifier: folder of a classifier for `c2t` and `c2t_chain`; None for the bundle's own.
        rows: prompts decoded at a time. More than one is several times faster, but not timed. Counts are the
            same up to near-ties in bf16, except for trees of one size for all rows: `timed`, `ngram+...`.

    Raises:
        UserError: prompts, bundle or policies are unusable.
    """
    if rows < 1:
        raise UserError(f"--rows: must be >= 1, got {rows}")
    out, console = Path(out), Console()
    trees = list(dict.fromkeys(trees))
    task, folder = Task.read(prompts), find_drafter(bundle)
    loaded = load_bundle(folder, target, dtype, device, calibration, classifier=classifier)
    dtype = dtype_name(loaded.target.dtype)  # that "auto" resolved to
    tokenizer = loaded.target.tokenizer
    made_from = [
        loaded.fingerprints,
        [tokenizer_hash(tokenizer), template_hash(tokenizer)],
        dtype,
        content_hash(prompts.path),
        prompts.limit,
        prompts.turns,
    ]
    made_from += [max_new_tokens, rows, versions()]
    made_from += [describe_machine(loaded.target.device, loaded.target.dtype)] if rows == 1 else []  # timed
    for tree in trees:
        loaded.proposer(tree)  # reports a mistake in any of them before the first is measured
        if warning := loaded.warning(tree):
            console.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    make_out(out)
    points = []
    for number, tree in enumerate(trees, 1):
        # a file for each: a sweep of more policies, or fewer, does not repeat what is measured
        path = out / "measurements" / f"{fingerprint(tree)}.json"
        key = [*made_from, *_depends_on(loaded, folder, tree)]
        if (counts := _read_counts(path, key)) is None:
            shown = f"{tree} ({number} of {len(trees)})"
            counts = count_tokens(loaded, tree, task, rows, max_new_tokens, shown)
            kept = [asdict(counts[0]), counts[1]]
            write_json(path, {"measured": fingerprint([key, kept]), "stats": kept[0], "by_prompt": kept[1]})
        stats, by_prompt = counts
        names = [name for name in Point.__dataclass_fields__ if name not in ("tree", "by_prompt")]
        points.append(Point(tree, **{name: getattr(stats, name) for name in names}, by_prompt=by_prompt))
        if rows > 1:
            points[-1].tokens_per_second = 0.0
    comparisons = compare_families(points, reference)
    machine = describe_machine(loaded.target.device, loaded.target.dtype)
    write_json(out / "sweep.json", {"machine": machine, "versions": versions(), "commit": git_commit()})
    _write_jsonl(out / "points.jsonl", [asdict(point) for point in points])
    _write_jsonl(out / "comparison.jsonl", [asdict(comparison) for comparison in comparisons])
    _print(points, comparisons, reference, console)
    return points, comparisons


def _depends_on(loaded: Bundle, folder: Path, tree: str) -> list[str]:
    """Return what the counts of a policy depend on besides drafter, prompts and dtype."""
    depends = []
    if drafter_policy(tree) != tree:
        depends = [content_hash(path) for name in SELF_DRAFT if (path := Path(folder) / name).is_file()]
    depends += costs_of(loaded, tree)
    if takes_classifier(tree):
        depends.append(weights_hash(loaded.classifier))
    return depends


def _read_counts(path: Path, key: list[Any]) -> tuple[DecodeStats, list[list[int]]] | None:
    """Return the counts that were made for this key; None where the file is missing, of another key, damaged
    or edited."""
    with contextlib.suppress(UserError, KeyError, TypeError):
        counts = read_json(path)
        if counts["measured"] == fingerprint([key, [counts["stats"], counts["by_prompt"]]]):
            return DecodeStats(**counts["stats"]), counts["by_prompt"]
    return None


def count_tokens(
    loaded: Bundle, tree: str, task: Task, rows: int, max_new_tokens: int, shown: str
) -> tuple[DecodeStats, list[list[int]]]:
    """Decode all turns of a task greedily, `rows` prompts at a time.

    Args:
        shown: title of the progress bar.

    Returns:
        the statistics of all, and `Point.by_prompt`.

    Raises:
        UserError: a prompt does not fit the target; before anything is decoded where that is certain.
    """
    target, proposer = loaded.target, loaded.proposer(tree)

    def encode(i: int, answers: Sequence[str]) -> list[int]:
        prompt = task.prompts[i]
        ids = prompt.token_ids(target.tokenizer, answers)
        target.check_length(ids, max_new_tokens, f"{task.name}: prompt {prompt.id}")
        return ids

    check_lengths(target, [task], max_new_tokens)
    turns = [min(task.turns, len(prompt.turns)) for prompt in task.prompts]
    stats, by_prompt = DecodeStats(), [[0, 0, 0] for _ in turns]
    answers: list[list[str]] = [[] for _ in turns]
    with counted(shown, task.n_turns, "turns") as step:
        for turn in range(max(turns)):
            asked = [i for i, played in enumerate(turns) if turn < played]
            ids = [encode(i, answers[i]) for i in asked]
            outputs: list[list[int]] = [[] for _ in asked]
            for made in decode(target, proposer, ids, max_new_tokens, stats=stats, max_rows=rows):
                parts = zip(asked, outputs, made.tokens, made.verified, made.finish_reason)
                for i, output, tokens, verified, ended in parts:
                    if output and tokens:  # its first token comes from the prompt's forward
                        added = (len(tokens), 1, verified)
                        by_prompt[i] = [sum(pair) for pair in zip(by_prompt[i], added)]
                    output += tokens
                    if ended:
                        step()
            for i, tokens in zip(asked, outputs):
                answers[i].append(target.tokenizer.decode(tokens, skip_special_tokens=True))
    return stats, by_prompt


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points whose accept_len no other reaches with as few verified tokens, by accept_len."""
    return [points[i] for i in _front(*_coordinates(points))]


def _coordinates(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    """Return accept_len and verified tokens per step of some points, each [points]."""
    return np.array([p.accept_len for p in points]), np.array([p.verify_per_step for p in points])


def _front(accept_len: np.ndarray, verified: np.ndarray) -> np.ndarray:
    """Return the indices of the points of a Pareto front, by ascending accept_len."""
    order = np.lexsort((verified, -accept_len))
    fewest = np.minimum.accumulate(np.append(np.inf, verified[order]))[:-1]  # among larger accept_len
    return order[verified[order] < fewest][::-1]


def compare_families(points: Sequence[Point], reference: str) -> list[Comparison]:
    """Compare each family with the reference, where their fronts have a common range of accept_len; fronts
    are interpolated linearly."""
    families = _families(points)
    base, comparisons = families.pop(reference, []), []
    for family, own in families.items():
        if (found := _ratios(_coordinates(own), _coordinates(base))) is None:
            continue
        grid, ratios = found
        at = {float(grid[i]): float(ratios[i]) for i in (round(share * (GRID - 1)) for share in FIXED)}
        interval = interval_of(resampled_means(points, family, reference))
        low, high = float(grid[0]), float(grid[-1])
        comparisons.append(Comparison(family, low, high, float(ratios.mean()), at, interval))
    return comparisons


def interval_of(drawn: np.ndarray | None) -> list[float] | None:
    """Return the 95 % confidence interval of resampled means [RESAMPLES], NaN left out; None without any."""
    if drawn is None or np.isnan(drawn).all():
        return None
    return np.nanquantile(drawn, [0.025, 0.975]).tolist()


def resampled_means(points: Sequence[Point], family: str, reference: str) -> np.ndarray | None:
    """Return `Comparison.mean` in resamples of the prompts, float64 [RESAMPLES]; NaN where the fronts of one
    have no accept_len in common.

    None: the counts of single prompts are not known, or there is only one.
    """
    families = _families(points)
    own, base = families[family], families[reference]
    if min(len(point.by_prompt) for point in [*own, *base]) < 2:
        return None
    counts = np.array([point.by_prompt for point in [*own, *base]])  # [points, prompts, 3]
    prompts = counts.shape[1]
    draws = np.random.default_rng(0).integers(prompts, size=(RESAMPLES, prompts))
    means, n = np.full(RESAMPLES, np.nan), len(own)
    for i, drawn in enumerate(counts[:, draws].sum(2).transpose(1, 2, 0)):
        emitted, steps, verified = drawn  # each [points]
        if not verified.all():
            continue  # one that verifies nothing gives no ratio
        lengths, sizes = emitted / steps, verified / steps
        if (found := _ratios((lengths[:n], sizes[:n]), (lengths[n:], sizes[n:]))) is not None:
            means[i] = found[1].mean()
    return means


def _families(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Group points by family, without those that verify nothing, which give no ratio."""
    families: dict[str, list[Point]] = {}
    for point in points:
        if point.verify_per_step > 0:
            families.setdefault(point.family, []).append(point)
    return families


def _ratios(
    own: tuple[np.ndarray, np.ndarray], base: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return accept_len over the common range of two fronts, and the ratio of verified tokens there, each
    [GRID]; None if they have none.

    Args:
        own, base: accept_len and verified tokens per step, each [points].
    """
    if not len(own[0]) or not len(base[0]):
        return None
    fronts = []
    for accept_len, verified in (own, base):
        front = _front(accept_len, verified)
        fronts.append((accept_len[front], verified[front]))
    low = max(accept_len[0] for accept_len, _ in fronts)
    high = min(accept_len[-1] for accept_len, _ in fronts)
    if low > high:
        return None
    grid = np.linspace(low, high, GRID)
    mine, others = (np.interp(grid, *front) for front in fronts)  # each [GRID]
    return grid, mine / others


def _write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _print(
    points: Sequence[Point], comparisons: Sequence[Comparison], reference: str, console: Console
) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tree", overflow="fold")
    for head in ("accept_len", "verified/step", "repetition"):
        table.add_column(head, justify="right", no_wrap=True)
    for point in points:
        cells = (f"{point.accept_len:.3f}", f"{point.verify_per_step:.2f}", f"{point.repetition:.3f}")
        table.add_row(point.tree, *cells)
    console.print(table)
    lines = []
    for c in comparisons:
        at = ", ".join(f"{ratio:.3f} at {accept_len:.2f}" for accept_len, ratio in c.at.items())
        interval = f" ({c.interval[0]:.3f} to {c.interval[1]:.3f})" if c.interval else ""
        lines.append(
            f"{c.family} verifies {c.mean:.3f}{interval} of the draft tokens of {reference} at equal "
            f"accept_len (mean over {c.low:.2f} to {c.high:.2f}; {at})"
        )
    families = {point.family for point in points}
    if reference not in families:
        lines.append(f"no tree of {reference} among them, so nothing is compared")
    elif alone := sorted(families - {reference, *(c.family for c in comparisons)}):
        lines.append(f"no accept_len in common with {reference}: {', '.join(alone)}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
