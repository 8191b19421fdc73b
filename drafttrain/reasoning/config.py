"""Settings of a search and the keys of a recipe of `drafttrain reason`."""

from dataclasses import dataclass, field
from typing import Literal

from drafttrain.reasoning.search import parse_search
from drafttrain.utils.choices import check_choices
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn.

    Attributes:
        temperature: 0 is greedy: all thoughts of a state are equal then.
        top_p: the smallest set of most probable tokens that together have this probability.
        top_k: at most this many of the most probable tokens. null: all.
    """

    temperature: float = setting(1.0, ge=0)
    top_p: float = setting(1.0, gt=0, le=1)
    top_k: int | None = setting(None, ge=1)


@dataclass(kw_only=True)
class SearchConfig:
    """How a tree of thoughts grows.

    Attributes:
        thoughts: generated from each state that is expanded.
        breadth: states of a level that are expanded, in `bfs`.
        steps: levels of thoughts; the closing generation comes after them. null: the task's.
        search: bfs (the paper's), dfs, astar or mcts; settings follow a colon, as in dfs:threshold=0.4.
        evaluator: value (each state's own score) or vote (votes for the best of several; bfs and dfs only).
        sampling: of all generated texts.
        max_new_tokens: limit of every answer. null: the limits of the task's prompts.
        seed: every call has a seed of its own, made from this one, the node's path and the call's number.
    """

    thoughts: int = setting(3, ge=1, le=1000)
    breadth: int = setting(1, ge=1, le=1000)
    steps: int | None = setting(None, ge=1, le=1000)
    search: str = "bfs"
    evaluator: Literal["value", "vote"] = "value"
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_new_tokens: int | None = setting(None, ge=1)
    seed: int = 0

    def check(self) -> None:
        """Validate the settings.

        Raises:
            UserError: a value out of range, an unknown search or setting of it, or votes where states are
                compared that are not evaluated together.
        """
        check_choices(self)
        check_ranges(self)
        check_ranges(self.sampling, "sampling")
        search = parse_search(self.search)
        if self.evaluator == "vote" and not search.votes:
            raise UserError(f"evaluator: must be value for search {self.search}, got vote")


@dataclass
class TaskConfig:
    """The problems.

    Attributes:
        name: of the task.
        path: file of its problems.
        limit: number of problems to take, evenly spaced. null: all.
        at_once: trees that grow at the same time; their calls are decoded together.
    """

    name: Literal["gsm8k", "writing", "blocksworld"]
    path: str
    limit: int | None = setting(None, ge=1)
    at_once: int = setting(1, ge=1)


@dataclass(frozen=True)
class SchedulerConfig:
    """How sequences that are decoded at the same time share target, drafter and machine.

    Attributes:
        verifier: the target verifies one draft at a time (the paper's), or those that wait, batched in one
            forward.
        drafting: each sequence drafts by itself (the paper's), or those that wait are joined in one forward.
        sequences: decoded at the same time at most.
        overlap: draft while the target verifies. auto: on a GPU; on a CPU, whose cores both need, turns were
            measured to be faster.
        threads: of the target, and of all drafting together, where they overlap. null: half of the cores
            each.
        shared_ngrams: sequences of one prompt draft from each other's n-grams. auto: unless candidates are
            drawn.
        short: limit up to which an answer gets no drafts, such as a score's: the drafter would read the
            prompt for a token or two. 0: all get drafts.
    """

    verifier: Literal["one", "batched"] = "batched"
    drafting: Literal["each", "joined"] = "joined"
    sequences: int = setting(8, ge=1)
    overlap: bool | Literal["auto"] = "auto"
    threads: list[int] | None = None
    shared_ngrams: bool | Literal["auto"] = "auto"
    short: int = setting(16, ge=0)

    def __post_init__(self) -> None:
        check_choices(self, "scheduler")
        check_ranges(self, "scheduler")
        if self.threads is not None and (len(self.threads) != 2 or min(self.threads) < 1):
            raise UserError(
                f"scheduler.threads: must be two numbers >= 1, of target and drafting, got {self.threads}"
            )


@dataclass(kw_only=True)
class ReasonConfig(SearchConfig):
    """A run of `drafttrain reason`: trees of thoughts for the problems of a task.

    Attributes:
        target: a name `drafttrain fetch-target` knows, a folder, a .gguf file or a Hub id.
        drafter: folder or Hub id of a bundle, or of a small LM that drafts untrained. null: none.
        dtype: what target and drafter compute in.
        task: the problems.
        scheduler: how drafts and verification share the machine.
        tree: growth policy of the drafts, as in evaluate.trees; without a drafter `ngram`, which drafts from
            n-grams of the context. null: the bundle's, and without a drafter no drafts.
        prefixes: encode what several prompts begin with only once.
        out: folder of the traces, one JSON file per tree; a run that was ended continues there.
    """

    target: str
    drafter: str | None = None
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    task: TaskConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    tree: str | None = None
    prefixes: bool = True
    out: str

    def check(self) -> None:
        """Validate all sections.

        Raises:
            UserError: as `SearchConfig.check`.
        """
        super().check()
        if self.tree not in (None, "ngram") and self.drafter is None:
            raise UserError(
                f"tree: must be null or ngram without a drafter, got {self.tree}; name one under drafter"
            )
        check_ranges(self.task, "task")
