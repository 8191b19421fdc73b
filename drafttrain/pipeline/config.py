"""The keys of recipes of `drafttrain pipeline`."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from drafttrain.trees.policies import POLICIES
from drafttrain.utils.choices import check_choices
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OTHERS = ("timed", "c2t", "c2t_chain", "drawn")  # trees that need more than a drafter


@dataclass
class StagesConfig:
    """How the target is cut.

    Attributes:
        ranks: number of processes that hold blocks of the target.
        blocks: number of blocks of each rank. null: balanced by the bytes that a token reads, head included.
            measured: by times that the ranks measure at the start, for machines of different speeds.
        groups: sizes of groups, whose ranks work on one layer of the tree one after the other: [2, 2] is two
            groups of two. null: every rank is a group.
        threads: threads of each rank. null: the usable cores, divided among the ranks of a machine.
    """

    ranks: int = setting(2, ge=1)
    blocks: list[int] | Literal["measured"] | None = None
    groups: list[int] | None = setting(None, ge=1)
    threads: int | None = setting(None, ge=1)

    def check(self) -> None:
        """Validate the settings.

        Raises:
            UserError: a value out of range, or lists that do not add up.
        """
        check_choices(self, "stages")
        check_ranges(self, "stages")
        if isinstance(self.blocks, list):
            if min(self.blocks, default=1) < 1:
                raise UserError(f"stages.blocks: must be >= 1, got {self.blocks}")
            if len(self.blocks) != self.ranks:
                raise UserError(
                    f"stages.blocks: must have {self.ranks} numbers, as stages.ranks, got {self.blocks}"
                )
        if self.groups is not None and sum(self.groups) != self.ranks:
            raise UserError(f"stages.groups: must add up to stages.ranks ({self.ranks}), got {self.groups}")


@dataclass(frozen=True)
class PaceConfig:
    """Declared times of stages and drafter, which simulate slower devices than this machine: results that are
    ready earlier are held back until then.

    Attributes:
        stage_ms: milliseconds of a stage, for any number of nodes. null: as long as it takes here.
        draft_ms: milliseconds of a draft step. null: as long as it takes here.
        curve: milliseconds of a stage by tokens, as pairs such as [[1, 30], [8, 45]], in place of stage_ms;
            proportional beyond the last pair. null: none.
    """

    stage_ms: float | None = setting(None, ge=0)
    draft_ms: float | None = setting(None, ge=0)
    curve: list[list[float]] | None = None

    def check(self) -> None:
        """Validate the settings.

        Raises:
            UserError: a value out of range, or a curve that is malformed or comes with stage_ms.
        """
        check_ranges(self, "pace")
        if self.curve is None:
            return
        if self.stage_ms is not None:
            raise UserError(
                f"pace.curve: must not be given beside pace.stage_ms, got {self.curve}; remove one"
            )
        _check_curve("pace.curve", self.curve)


@dataclass(frozen=True)
class DrawConfig:
    """How tokens are sampled.

    Attributes:
        temperature: 0 is greedy decoding.
        top_p: sample from the smallest set of most probable tokens whose probabilities add up to this.
        top_k: sample from at most this many of the most probable tokens. null: from all.
        seed: seed of the random draws.
    """

    temperature: float = setting(0.0, ge=0)
    top_p: float = setting(1.0, gt=0, le=1)
    top_k: int | None = setting(None, ge=1)
    seed: int = 0


@dataclass(frozen=True)
class LinkConfig:
    """A connection between two stages.

    Attributes:
        gbit: bandwidth in 10^9 bits per second.
        ms: latency of a message in milliseconds.
    """

    gbit: float = setting(10.0, gt=0)
    ms: float = setting(0.1, ge=0)


@dataclass(kw_only=True)
class PipelineConfig:
    """A run of `drafttrain pipeline`: prompts decoded by a target that is spread over processes.

    Attributes:
        target: a name `drafttrain fetch-target` knows, a folder, a .gguf file or a Hub id.
        drafter: folder or Hub id of a bundle, or folder of a small LM that drafts untrained. null: none (pp).
        dtype: data type in which target and drafter compute.
        device: auto (the GPU of each rank if there is one, else the CPU), cpu or cuda.
        mode: pipedec (a tree in flight, every stage on another layer of it), stpp (a static tree passes all
            stages, then the next one), pp (a token at a time) or, to compare with, slm (the small LM that
            otherwise drafts decodes alone while all stages idle).
        width: maximum number of nodes per layer of the tree in flight.
        children: number of candidates for each node of the tree in flight.
        layers: layers it grows by per timestep; several (ours) pay if a draft is much faster than a stage.
        best_first: grow it by the nodes that save most timesteps, at any depth (ours), not by layers.
        tree: static tree of stpp, such as chain:length=4, static:k_config=3-2-1 or one of eagle2.
        concurrency: prompts at a time, which fill the stages in pp and stpp; pipedec takes them in turn.
        stages: how the target is cut.
        drafter_rank: beside (the drafter shares the first stage's process) or alone (it has a separate one).
        prompts: a file of prompts, of which the first turns are used. null: a program passes them.
        limit: number of prompts to take, evenly spaced. null: all.
        max_new_tokens: token limit of every answer.
        sampling: how tokens are sampled.
        pace: declared times of stages and drafter.
        link: simulate a slower network between the ranks of one machine. null: none.
        probe: before decoding, compare the logits of the stages with those of the whole target, whose blocks
            the last rank loads one by one.
        timeout_s: seconds without an expected message after which a rank counts as lost.
        out: folder of the results. null: they are only returned to a program.
    """

    target: str
    drafter: str | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    mode: Literal["pipedec", "stpp", "pp", "slm"] = "pipedec"
    width: int = setting(4, ge=1)
    children: int = setting(4, ge=1)
    layers: int = setting(1, ge=1, le=64)
    best_first: bool = False
    tree: str = "chain:length=4"
    concurrency: int = setting(1, ge=1)
    stages: StagesConfig = field(default_factory=StagesConfig)
    drafter_rank: Literal["beside", "alone"] = "beside"
    prompts: str | None = None
    limit: int | None = setting(None, ge=1)
    max_new_tokens: int = setting(128, ge=1)
    sampling: DrawConfig = field(default_factory=DrawConfig)
    pace: PaceConfig = field(default_factory=PaceConfig)
    link: LinkConfig | None = None
    probe: bool = True
    timeout_s: float = setting(60.0, gt=0)
    out: str | None = None

    def check(self) -> None:
        """Validate all sections.

        Raises:
            UserError: a value out of range, lists that do not add up, or a mode that needs a drafter.
        """
        check_choices(self)
        check_ranges(self)
        check_ranges(self.sampling, "sampling")
        self.pace.check()
        if self.link is not None:
            check_ranges(self.link, "link")
        self.stages.check()
        paced = self.pace.stage_ms is not None or self.pace.curve is not None
        if self.stages.blocks == "measured" and paced:
            raise UserError(
                "stages.blocks: must not be measured where times are declared, got pace.stage_ms or "
                "pace.curve; give numbers of blocks"
            )
        if self.drafter is None and self.mode != "pp":
            raise UserError(f"drafter: must be set for mode {self.mode}, got null; name one, or take mode pp")
        if self.drafter_rank == "alone" and self.drafter is None:
            raise UserError("drafter_rank: must be beside without a drafter, got alone")
        self._check_tree()

    def _check_tree(self) -> None:
        """Require a tree that needs nothing but a drafter."""
        name = self.tree.partition(":")[0]
        allowed = [one for one in POLICIES if one not in OTHERS]
        if name in OTHERS:
            raise UserError(
                f"tree: must need no calibration, classifier or draws, got {self.tree}; take chain, static "
                "or eagle2"
            )
        if name not in allowed:
            raise UserError(f"tree: must be one of {', '.join(allowed)}, got {self.tree}")
        settings = dict(part.partition("=")[::2] for part in self.tree.partition(":")[2].split(","))
        if name == "pct" and settings.get("threshold", "none") == "none":
            raise UserError(
                f"tree: must have a threshold if it is pct, got {self.tree}; write pct:threshold=0.1, as "
                "pipelines take none from a calibration"
            )
        from drafttrain.trees.parse import parse_policy  # lazy: imports torch

        parse_policy(self.tree)

    @property
    def drafts(self) -> bool:
        """Return whether the mode uses the drafter."""
        return self.drafter is not None and self.mode != "pp"

    @property
    def world_size(self) -> int:
        """Return the number of processes: stages, and a drafter that is alone."""
        return self.stages.ranks + (self.drafter_rank == "alone")


def head_in_blocks(config: "PreTrainedConfig") -> float:
    """Return the size of the LM head in blocks: its number of weights divided by that of a block."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden  # as GPT-2 names none
    block = 2 * hidden * dim * (heads + kv_heads) + 3 * hidden * inner
    return config.vocab_size * hidden / block


def balanced(n_blocks: int, ranks: int, head: float) -> list[int]:
    """Return the number of blocks of each rank, so that ranks take about equally long.

    Args:
        head: cost of the last rank's head, in blocks.

    Raises:
        UserError: there are more ranks than blocks.
    """
    if ranks > n_blocks:
        raise UserError(f"stages.ranks: must be <= {n_blocks}, the target's blocks, got {ranks}")
    share = (n_blocks + head) / ranks
    last = min(max(1, round(share - head)), n_blocks - ranks + 1) if ranks > 1 else n_blocks
    rest, others = n_blocks - last, ranks - 1
    return [rest // others + (i < rest % others) for i in range(others)] + [last]


@dataclass(kw_only=True)
class SimulateConfig:
    """A run of `drafttrain pipeline --simulate`: real hits, and the time that pipelines would take.

    Attributes:
        target: a name `drafttrain fetch-target` knows, a folder, a .gguf file or a Hub id.
        drafter: folder or Hub id of a bundle, or folder of a small LM that drafts untrained.
        dtype: data type in which target and drafter compute.
        prompts: a file of prompts, the first turn of each.
        limit: number of prompts to take, evenly spaced. null: all.
        max_new_tokens: token limit of every answer.
        sampling: how tokens are sampled.
        concurrency: prompts at a time, which fill the stages in pp and stpp; pipedec takes them in turn.
        stages: numbers of stages to simulate; with `costs` at most the target's blocks.
        width: maximum number of nodes per layer of the tree in flight.
        children: number of candidates for each node of the tree in flight.
        layers: layers it grows by per timestep; several (ours) pay if a draft is much faster than a stage.
        best_first: grow it by the nodes that save most timesteps, at any depth (ours), not by layers.
        link: network between neighbouring stages.
        target_ms: milliseconds of the whole target's forward by tokens, as pairs such as [[1, 400], [32,
            400]]. null: measured on this machine.
        draft_ms: milliseconds of a draft step by expanded nodes, as pairs. null: measured on this machine.
        sync_ms: milliseconds of the broadcast at the end of a timestep.
        costs: costs.json of `drafttrain pipeline --calibrate`, in place of target_ms, draft_ms and sync_ms;
            the sum of its stages is the whole target, and `link` is added to its messages. null: none.
        threads: number of threads for measurements on this machine.
        out: folder of the results. null: they are only returned to a program.
    """

    target: str
    drafter: str
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    prompts: str
    limit: int | None = setting(None, ge=1)
    max_new_tokens: int = setting(128, ge=2)
    sampling: DrawConfig = field(default_factory=DrawConfig)
    concurrency: int = setting(1, ge=1)
    stages: list[int] = setting(default_factory=lambda: [2, 4, 7, 14], ge=1, le=1000)
    width: int = setting(8, ge=1)
    children: int = setting(8, ge=1)
    layers: int = setting(1, ge=1, le=64)
    best_first: bool = False
    link: LinkConfig = field(default_factory=LinkConfig)
    target_ms: list[list[float]] | None = None
    draft_ms: list[list[float]] | None = None
    sync_ms: float = setting(0.5, ge=0)
    costs: str | None = None
    threads: int = setting(1, ge=1)
    out: str | None = None

    def check(self) -> None:
        """Validate all sections.

        Raises:
            UserError: a value out of range, or a malformed curve.
        """
        check_ranges(self)
        check_ranges(self.sampling, "sampling")
        check_ranges(self.link, "link")
        if not self.stages:
            raise UserError("stages: must have at least one number, got []")
        given = {name: getattr(self, name) for name in ("target_ms", "draft_ms")}
        given = {name: curve for name, curve in given.items() if curve is not None}
        for name, curve in given.items():
            _check_curve(name, curve)
        if given and self.costs is not None:
            remedy = " ".join(f"--{name} null" for name in given)
            raise UserError(f"{next(iter(given))}: must be null beside costs, got times; add {remedy}")


def _check_curve(name: str, curve: list[list[float]]) -> None:
    if not curve or any(len(point) != 2 for point in curve):
        raise UserError(f"{name}: must be pairs of a size and its milliseconds, got {curve}")
    sizes, times = [point[0] for point in curve], [point[1] for point in curve]
    if sizes != sorted(set(sizes)) or not all(size >= 1 and float(size).is_integer() for size in sizes):
        raise UserError(f"{name}: must have ascending whole sizes from 1 on, got {sizes}")
    if times != sorted(times) or not all(0 < ms < math.inf for ms in times):
        raise UserError(f"{name}: must have positive, finite milliseconds that do not fall, got {times}")
