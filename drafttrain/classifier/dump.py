"""Grow and label the trees that the classifier of `drafttrain c2t` learns from: a row for each node of full
EAGLE-2 trees.

The target's own text is decoded first, once per prompt. Decoding by any exact rule gives just that text, so
the path that the rule accepts in a tree is the text after its root: trees are grown where decoding would grow
them, and nothing has to be verified again. At temperature above 0 the text is the one that `AcceptMatching`
draws, whose draws belong to positions of the output and not to trees.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console

from drafttrain.classifier.config import ROW_BYTES, DumpConfig
from drafttrain.inference.acceptance import accept_greedy
from drafttrain.inference.decode import decode_all
from drafttrain.inference.matching import AcceptMatching
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.eagle2 import expand_best
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.disk import require_free_disk
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.hashes import sha256_file
from drafttrain.utils.progress import counted
from drafttrain.utils.writing import write_json

FILE = "trees.json"
FORMAT_VERSION = 1
SHARD_PROMPTS = 16  # what an interruption loses at most
SCHEMA = pa.schema(
    [
        ("tree", pa.int32()),  # number of the prompt * max_new_tokens + place of the root in the output
        ("P", pa.float32()),  # the features of trees/features.py
        ("H", pa.float32()),
        ("d", pa.int8()),
        ("p", pa.float32()),
        ("rank", pa.int8()),
        ("parent_rank", pa.int8()),  # -1 below the root
        ("accepted", pa.bool_()),
    ]
)


def write_trees(
    config: DumpConfig,
    target: FrozenTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    out: Path,
    made_from: dict[str, Any],
    shards: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Grow, label and write the trees of prompts that are not in the given shards yet; return `trees.json`.

    Args:
        prompts: token ids of each.
        made_from: what the trees depend on, for the record.
        shards: those that an interrupted call has finished, as `trees.json` lists them.

    Raises:
        UserError: the disk is too small.
    """
    console = Console()
    parts = [prompts[first : first + SHARD_PROMPTS] for first in range(0, len(prompts), SHARD_PROMPTS)]
    names = [f"shard-{number:05d}.parquet" for number in range(len(parts))]
    made = dict(zip(names, map(_fingerprint, parts)))
    done = {  # with another limit of prompts a shard holds others
        shard["file"]: shard
        for shard in shards
        if made.get(shard["file"]) == shard["fingerprint"] and _is_whole(out, shard)
    }
    todo = [number for number, name in enumerate(names) if name not in done]
    most = sum(len(parts[number]) for number in todo) * config.max_new_tokens
    rows = most * config.nodes(drafter.draft_vocab_size)
    if todo:
        console.print(
            f"at most {most} trees, {rows / 1e6:.1f} M rows, {rows * ROW_BYTES / 1e9:.2f} GB: this many if "
            "no draft is accepted, and before compression",
            highlight=False,
        )
        require_free_disk(out, int(rows * ROW_BYTES), "the dump of trees")
    out.mkdir(parents=True, exist_ok=True)
    with counted("growing trees", most, "tokens", console) as advance:
        for number in todo:
            shard = _write_shard(
                config,
                target,
                drafter,
                parts[number],
                number * SHARD_PROMPTS,
                out / names[number],
                advance,
            )
            done[names[number]] = shard
            listed = [done[name] for name in names if name in done]
            write_json(out / FILE, {**_record(config, drafter, made_from, listed), "finished": False})
    # the limit may be lower than that of an earlier call: what is beyond it stays where it is, unlisted
    record = _record(config, drafter, made_from, [done[name] for name in names])
    write_json(out / FILE, record)
    _show(record, out, console)
    return record


def label_trees(
    drafter: Drafter,
    texts: torch.Tensor,
    tapped: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    top_k: int,
    max_depth: int,
) -> Iterator[tuple[TokenTree, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield the trees that decoding with full trees would grow along texts: the first root is the first token
    after the prompt, and the token after an accepted path is the next root.

    Args:
        texts: prompt and output, int64 [B, T]; -1 after the last token.
        tapped: the target's tapped hidden states at them [B, T, K*H].
        starts: tokens of the prompts, int64 [B].
        ends: first position in each row that is no root any more, int64 [B].

    Yields:
        trees; which nodes are accepted, the root among them, bool [B, n]; the roots' positions, int64 [B];
        and which rows have not ended, bool [B].
    """
    batch, length = texts.shape
    state = drafter.new_state(batch, length + max_depth)
    known = texts.clamp(min=0)  # [B, T]
    prompt = int(starts.max())
    drafter.update(state, known[:, :prompt], tapped[:, :prompt], starts)
    roots = starts  # [B]
    rows = torch.arange(batch, device=texts.device)[:, None]  # [B, 1]
    padded = torch.nn.functional.pad(texts, (0, max_depth + 1), value=-1)  # [B, T + max_depth + 1]
    while bool((active := roots < ends).any()):
        tree = expand_best(
            drafter, state, known.gather(1, roots[:, None])[:, 0], top_k, max_depth, entropies=True
        )
        ahead = padded[rows, roots[:, None] + torch.arange(max_depth + 1, device=texts.device)]  # [B, d + 1]
        accepted = accepted_nodes(tree, ahead)  # [B, n]
        yield tree, accepted, roots, active
        counts = accepted.sum(1) * active  # [B]
        path = roots[:, None] + torch.arange(int(counts.max()), device=texts.device)  # [B, m]
        path = path.clamp(max=length - 1)
        drafter.update(state, known.gather(1, path), tapped[rows, path], counts)
        # a row that has ended stays at its last root, so that it goes on reading within its text
        roots = torch.where(active, roots + counts, roots).clamp(max=length - 1)


def accepted_nodes(tree: TokenTree, ahead: torch.Tensor) -> torch.Tensor:
    """Return the nodes on the accepted path, bool [B, n]: they and their ancestors are the target's tokens.

    Args:
        ahead: the target's token at each depth, the root's own first, int64 [B, depth + 1]; -1 where
            the text has ended.
    """
    is_root = tree.parents < 0  # [B, n]
    matches = (tree.tokens == ahead.gather(1, tree.depths)) & tree.valid  # [B, n]
    above = tree.parents.clamp(min=0)  # [B, n]
    accepted = is_root
    for _ in range(int(tree.depths.max())):  # each round is right for one more generation
        accepted = accepted.gather(1, above) & matches | is_root
    return accepted


def _write_shard(
    config: DumpConfig,
    target: FrozenTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    first: int,
    path: Path,
    on_tokens: Callable[[int], None],
) -> dict[str, Any]:
    """Dump the trees of some prompts, the first of which is number `first`; return the shard's entry."""
    started, blocks, left_out = time.perf_counter(), [], 0
    outputs = _outputs(config, target, prompts, first)
    for at in range(0, len(prompts), config.rows):
        part = slice(at, at + config.rows)
        with target.own_cores():
            for block in _blocks(
                config, target, drafter, prompts[part], outputs[part], first + at, on_tokens
            ):
                finite = np.isfinite(block["P"]) & np.isfinite(block["p"]) & np.isfinite(block["H"])
                left_out += int((~finite).sum())
                blocks.append({name: values[finite] for name, values in block.items()})
    columns = {
        name: np.concatenate([block[name] for block in blocks]) if blocks else np.empty(0)
        for name in SCHEMA.names
    }
    table = pa.table({name: pa.array(columns[name]).cast(SCHEMA.field(name).type) for name in SCHEMA.names})
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, temporary, compression="zstd")
    os.replace(temporary, path)
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "sha256": sha256_file(path),
        "prompts": len(prompts),
        "fingerprint": _fingerprint(prompts),
        "trees": len(blocks),
        "rows": table.num_rows,
        "accepted": int(columns["accepted"].sum()),
        "left_out": left_out,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _outputs(
    config: DumpConfig, target: FrozenTarget, prompts: Sequence[Sequence[int]], first: int
) -> list[list[int]]:
    """Return the target's answer to each prompt, long enough for the last root's tree to end within it."""
    rule = accept_greedy
    if config.temperature:
        seeds = [1_000_003 * config.seed + first + row for row in range(len(prompts))]
        rule = AcceptMatching([SamplingParams(config.temperature, seed=seed) for seed in seeds])
    most = config.max_new_tokens + config.max_depth
    return decode_all(target, NoProposer(), prompts, most, accept=rule)[0]


def _blocks(
    config: DumpConfig,
    target: FrozenTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    first: int,
    on_tokens: Callable[[int], None],
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the columns of each tree of some prompts, whose trees are grown in one batch."""
    device, stop = target.device, target.eos_token_ids
    whole = [[*prompt, *output] for prompt, output in zip(prompts, outputs)]
    length = max(map(len, whole))
    texts = torch.tensor([text + [-1] * (length - len(text)) for text in whole], device=device)  # [B, T]
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device)  # [B]
    # nothing follows a stop token, so it is no root
    ends = [min(config.max_new_tokens, len(output) - (output[-1] in stop)) for output in outputs]
    ends = starts + torch.tensor(ends, device=device)  # [B]
    tapped = target.encode(texts.clamp(min=0), torch.zeros_like(texts)).tapped  # [B, T, K*H]
    siblings = min(config.top_k, drafter.draft_vocab_size)
    reached = 0
    for tree, accepted, roots, active in label_trees(
        drafter, texts, tapped, starts, ends, config.top_k, config.max_depth
    ):
        places = (roots - starts).tolist()  # of the roots in the outputs
        now = sum(min(place, config.max_new_tokens) for place in places)
        on_tokens(now - reached)
        reached = now
        rank = (torch.arange(tree.width, device=device) - 1) % siblings  # [n]
        rank[0] = -1
        columns = {
            "P": tree.joint_log_probs().exp(),
            "H": tree.entropies,
            "d": tree.depths,
            "p": tree.log_probs.exp(),
            "rank": rank.expand_as(tree.depths),
            "parent_rank": rank[tree.parents.clamp(min=0)],
            "accepted": accepted,
        }
        arrays = {name: values[:, 1:].cpu().numpy() for name, values in columns.items()}  # [B, n - 1]
        for row in active.nonzero()[:, 0].tolist():
            number = (first + row) * config.max_new_tokens + places[row]
            tree_id = np.full(tree.width - 1, number, dtype=np.int32)
            yield {"tree": tree_id, **{name: values[row] for name, values in arrays.items()}}
    on_tokens(len(texts) * config.max_new_tokens - reached)


def finished_shards(out: Path, made_from: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the shards that an interrupted dump of the same drafter, prompts and settings has finished.

    Raises:
        UserError: the folder holds trees of another drafter, other prompts or settings, or a damaged record.
    """
    if not (out / FILE).exists():
        return []
    record = read_record(out)
    known = record["made_from"].items()
    # earlier versions noted a seed for greedy texts, too
    if made_from != {name: value for name, value in known if name in made_from or name != "seed"}:
        raise UserError(
            f"{out}: holds trees of another drafter, other prompts or settings; give another folder, or "
            "delete it"
        )
    return record["shards"]


def read_record(folder: Path) -> dict[str, Any]:
    """Read `trees.json` of a dump.

    Raises:
        UserError: there is none, or of another format.
    """
    if not (folder / FILE).exists():
        raise UserError(f"{folder}: no {FILE} here; give a folder of trees that drafttrain c2t wrote")
    record = read_json(folder / FILE)
    if not isinstance(record, dict) or record.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{folder / FILE}: no trees of format {FORMAT_VERSION}; dump them again")
    return record


def _fingerprint(prompts: Sequence[Sequence[int]]) -> str:
    """Identify the prompts that the trees of a shard belong to."""
    return fingerprint([list(prompt) for prompt in prompts])


def _is_whole(out: Path, shard: dict[str, Any]) -> bool:
    path = out / shard["file"]
    if "sha256" not in shard:  # as earlier versions wrote it
        return path.exists() and path.stat().st_size == shard["bytes"]
    return path.exists() and sha256_file(path) == shard["sha256"]


def _record(
    config: DumpConfig, drafter: Drafter, made_from: dict[str, Any], shards: list[dict[str, Any]]
) -> dict[str, Any]:
    totals = {
        name: sum(shard[name] for shard in shards) for name in ("trees", "rows", "accepted", "left_out")
    }
    return {
        "format_version": FORMAT_VERSION,
        "made_from": made_from,
        "nodes": config.nodes(drafter.draft_vocab_size),
        **totals,
        "seconds": sum(shard["seconds"] for shard in shards),
        "shards": shards,
    }


def _show(record: dict[str, Any], out: Path, console: Console) -> None:
    size = sum(shard["bytes"] for shard in record["shards"])
    trees = record["trees"]
    console.print(
        f"{out}: {trees} trees of {record['nodes']} nodes, {record['rows']} rows, {size / 1e6:.1f} MB; "
        f"{record['accepted'] / max(trees, 1):.2f} accepted per tree, {record['left_out']} rows left out as "
        f"not finite; {trees / max(record['seconds'], 1e-9):.1f} trees/s",
        highlight=False,
        soft_wrap=True,
    )
