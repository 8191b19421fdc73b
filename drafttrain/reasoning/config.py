"""Settings of a search and the keys of a recipe of `drafttrain reason`."""

from dataclasses import dataclass, field
from typing import Literal

from drafttrain.reasoning.search import parse_search
from drafttrain.trees.policies import WITH_NGRAMS, drafter_policy
from drafttrain.utils.choices import check_choices
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are sampled.

    Attributes:
        temperature: 0 is greedy decoding, with which all thoughts of a state are equal.
        top_p: sample from the smallest set of most probable tokens whose probabilities add up to this.
        top_k: sample from at most this many of the most probable tokens. null: from all.
    """

    temperature: float = setting(1.0, ge=0)
    top_p: float = setting(1.0, gt=0, le=1)
    top_k: int | None = setting(None, ge=1)


@dataclass(kw_only=True)
class SearchConfig:
    """How a tree of thoughts grows.

    Attributes:
        thoughts: number of thoughts generated from each state that is expanded.
        breadth: number of states that `bfs` keeps of each level, the best ones, and expands.
        steps: levels of thoughts, not counting the closing generation after them. null: the task's default.
        search: bfs (the paper's), dfs, astar or mcts; settings follow a colon, as in dfs:threshold=0.4.
        evaluator: value (each state gets a score) or vote (votes for the best of several; bfs and dfs only).
        sampling: how tokens of all generated texts are sampled.
        max_new_tokens: token limit of every answer, unless its prompt's is lower. null: the prompts' limits.
        seed: base seed. Each call's seed is derived from it, the node's path and the call's number.
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
            UserError: a value is out of range, the search or a setting of it is unknown, or `evaluator` is
                vote for a search that compares states of different evaluations.
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
        name: name of the task.
        path: file of its problems.
        limit: number of problems to take, evenly spaced. null: all.
        at_once: number of trees that grow at the same time; their calls are decoded together.
    """

    name: Literal["gsm8k", "writing", "blocksworld"]
    path: str
    limit: int | None = setting(None, ge=1)
    at_once: int = setting(1, ge=1)


@dataclass(frozen=True)
class SchedulerConfig:
    """How sequences that are decoded at the same time share target, drafter and machine.

    Attributes:
        verifier: one (the target verifies one draft at a time, as in the paper) or batched (all waiting
            drafts in one target forward).
        drafting: each (every sequence drafts alone, as in the paper) or joined (one forward for all waiting).
        sequences: maximum number of sequences that are decoded at the same time.
        overlap: draft while the target verifies. auto: true on a GPU, false on a CPU, where both need the
            cores and taking turns was measured to be faster.
        threads: numbers of threads of the target and of all drafting together, where the two overlap. null:
            half of the cores each.
        shared_ngrams: sequences of the same prompt draft from each other's n-grams. auto: true unless draft
            candidates are sampled.
        short: answers limited to at most this many tokens, such as scores, get no drafts: the drafter would
            prefill the prompt for a token or two. 0: all answers get drafts.
        chunk: maximum number of prompt tokens in a target forward that also verifies drafts (chunked
            prefill). null: the whole prompt.
    """

    verifier: Literal["one", "batched"] = "batched"
    drafting: Literal["each", "joined"] = "joined"
    sequences: int = setting(8, ge=1, le=1024)
    overlap: bool | Literal["auto"] = "auto"
    threads: list[int] | None = None
    shared_ngrams: bool | Literal["auto"] = "auto"
    short: int = setting(16, ge=0)
    chunk: int | None = setting(None, ge=1)

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
        dtype: data type in which target and drafter compute.
        task: the problems.
        scheduler: how drafts and verification share the machine.
        tree: growth policy of draft trees, as in evaluate.trees; without a drafter only `ngram`, which drafts
            from n-grams of the context. null: the bundle's policy; without a drafter, no drafts.
        prefixes: encode a prefix that several prompts share only once.
        out: folder of the traces, one JSON file per tree; an interrupted run resumes from them.
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
            UserError: as `SearchConfig.check`, or there is no such tree or setting of it. A tree that needs
                a calibration or a classifier is checked once the bundle is loaded.
        """
        super().check()
        if self.tree not in (None, "ngram") and self.drafter is None:
            raise UserError(
                f"tree: must be null or ngram without a drafter, got {self.tree}; name one under drafter"
            )
        check_ranges(self.task, "task")
        policy = drafter_policy(self.tree or "")
        draws = bool(policy) and _draws(policy)
        if draws and self.tree != policy:
            raise UserError(
                f"tree: must be a deterministic one after ngram+, got {self.tree}; n-grams have no "
                "probabilities to draw from"
            )
        if draws and self.scheduler.shared_ngrams is True:
            raise UserError(
                f"scheduler.shared_ngrams: must be false or auto with tree {self.tree}, got true; n-grams "
                "have no probabilities to draw from"
            )


def _draws(tree: str) -> bool:
    """Return whether a growth policy draws its candidates.

    Raises:
        UserError: it does not exist or has wrong settings, and no bundle gives some.
    """
    from drafttrain.trees.parse import parse_policy, takes_classifier, takes_costs  # lazy: imports torch

    needs_bundle = takes_costs(tree) or takes_classifier(tree)  # those that do draw nothing
    return not needs_bundle and parse_policy(tree, others=WITH_NGRAMS).draws
