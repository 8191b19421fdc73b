"""Settings of the corpus stage and of the regeneration stage."""

from dataclasses import dataclass, field
from typing import Any, Literal

from drafttrain.utils.errors import UserError

Format = Literal["auto", "sharegpt", "messages", "alpaca", "text", "oanc"]
HUB = "hub:"  # starts the name of a data set on the Hub that prompts are read from
_HOW_TO_RUN: dict[str, Any] = {"changes_output": False}


@dataclass
class PromptSet:
    """One set of evaluation prompts.

    Attributes:
        name: name of the row in the result table.
        path: file of prompts.
        limit: how many to take, evenly spaced. null: all.
        turns: how many turns of each chat are played (MT-bench has two); the target answers the earlier ones.
    """

    name: str
    path: str
    limit: int | None = None
    turns: int = 1


@dataclass
class Source:
    """One file, folder or archive of training text.

    Attributes:
        path: what to read.
        format: as `read_conversations`.
        max_conversations: stop after this many that are kept; None for all.
    """

    path: str
    format: Format = "auto"
    max_conversations: int | None = None


@dataclass
class CorpusConfig:
    """What a corpus is made from.

    Attributes:
        sources: read in this order.
        max_length: longest example, in tokens. Default: training.row_length.
        validation_fraction: share of conversations held out, whole chats only.
        exclude: files of evaluation prompts; conversations that contain one are left out.
        deduplicate: whether to keep only the first of several equal conversations.
        seed: of the split.
        processes: number of encoding processes; does not change the result.
    """

    sources: list[Source] = field(default_factory=list)
    max_length: int = 512
    validation_fraction: float = 0.02
    exclude: list[str] = field(default_factory=list)
    deduplicate: bool = True
    seed: int = 0
    processes: int = field(default=1, metadata={"changes_output": False})

    def check(self) -> None:
        """Raises:
        UserError: a value that makes no sense.
        """
        if not self.sources:
            raise UserError("corpus.sources: empty; name at least one file, folder or archive")
        for name, value, low in (("max_length", self.max_length, 2), ("processes", self.processes, 1)):
            if value < low:
                raise UserError(f"corpus.{name}: {value} is too small; at least {low} is needed")
        if not 0 <= self.validation_fraction < 1:
            raise UserError(f"corpus.validation_fraction: {self.validation_fraction} is not within [0, 1)")
        for source in self.sources:
            if source.max_conversations is not None and source.max_conversations < 1:
                raise UserError(f"{source.path}: max_conversations must be positive or left out")


@dataclass
class ServerConfig:
    """A server that generates (section `regenerate.server` of a recipe).

    Attributes:
        url: such as http://localhost:8000/v1; /v1 is added to a bare host.
        model: its name there. Default: the one model that the server lists.
        endpoint: "completions" sends token ids, so that the prompt is exactly what the drafter will be
            trained on; "chat" sends messages, for servers that take no token ids, and the server's own
            template renders them.
        concurrency: requests under way at once.
        retries: how often a request is sent again after a failure that may pass (429, 5xx, timeout, broken
            answer).
        retry_wait_s: wait before the first retry; it doubles each time. A server's Retry-After is obeyed.
        timeout_s: how long one reply may take.
        seeds: send each request's seed. false for servers that refuse them (vLLM on CPU); sampled replies
            then differ if they are made again.
        key_variable: environment variable that holds the API key, if the server wants one.
    """

    url: str = field(metadata=_HOW_TO_RUN)
    model: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    concurrency: int = field(default=64, metadata=_HOW_TO_RUN)
    retries: int = field(default=6, metadata=_HOW_TO_RUN)
    retry_wait_s: float = field(default=1.0, metadata=_HOW_TO_RUN)
    timeout_s: float = field(default=600.0, metadata=_HOW_TO_RUN)
    seeds: bool = True
    key_variable: str = field(default="OPENAI_API_KEY", metadata=_HOW_TO_RUN)


@dataclass
class RegenerateConfig:
    """Which conversations the target answers anew, and how (section `regenerate` of a recipe).

    Attributes:
        sources: conversations, as in `corpus.sources`; prompts without answers will do.
        max_turns: user turns of a conversation that are answered.
        max_new_tokens: longest answer. One that is cut off there has no end-of-turn token.
        max_prompt_tokens: a conversation ends before the turn whose prompt is longer than this.
        greedy_fraction: share of conversations answered greedily; the others are sampled.
        temperature: of the sampled ones.
        top_p: of the sampled ones.
        seed: of the choice between the two and of each draw; a resumed run draws the same.
        deduplicate: skip conversations whose system and user turns have all occurred before.
        batch_rows: answers decoded at once in process.
        max_cache_gb: memory for their keys and values (10^9 bytes), which lowers batch_rows where it is too
            small. null: half of what is free on the GPU, 4 on a CPU.
        max_minutes: end after this many minutes with the answers that are there. With a higher limit the same
            command answers the other conversations as well.
        max_rows: end with this many conversations, likewise; those of an interrupted call count.
        max_failed: share of conversations without an answer (NaN, refused requests) above which the run
            stops.
        server: an OpenAI-compatible server that generates instead of this process.
    """

    sources: list[Source] = field(default_factory=list)
    max_turns: int = 4
    max_new_tokens: int = 512
    max_prompt_tokens: int = 1024
    greedy_fraction: float = 0.5
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0
    deduplicate: bool = True
    batch_rows: int = field(default=128, metadata=_HOW_TO_RUN)
    max_cache_gb: float | None = field(default=None, metadata=_HOW_TO_RUN)
    max_minutes: float | None = None
    max_rows: int | None = None
    max_failed: float = field(default=0.1, metadata=_HOW_TO_RUN)
    server: ServerConfig | None = None

    def check(self) -> None:
        """Raises:
        UserError: a value that makes no sense.
        """
        if not self.sources:
            raise UserError("regenerate.sources: empty; name at least one file, folder or archive")
        for name in ("max_turns", "max_new_tokens", "max_prompt_tokens", "batch_rows"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"regenerate.{name}: {getattr(self, name)} is too small; at least 1 is needed"
                )
        if self.server is not None and self.server.concurrency < 1:
            raise UserError(f"regenerate.server.concurrency: {self.server.concurrency} is too small")
        for name in ("greedy_fraction", "top_p", "max_failed"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"regenerate.{name}: {getattr(self, name)} is not within 0 and 1")
        if self.temperature < 0 or self.top_p == 0:
            raise UserError("regenerate: temperature must not be negative (0 is greedy) and top_p not 0")
