"""Settings of the corpus stage and of the regeneration stage."""

from dataclasses import dataclass, field
from typing import Any, Literal

from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting

Format = Literal["auto", "sharegpt", "messages", "alpaca", "text", "oanc"]
HUB = "hub:"  # starts the name of a data set on the Hub that prompts are read from
_HOW_TO_RUN: dict[str, Any] = {"changes_output": False}


@dataclass
class PromptSet:
    """One set of evaluation prompts.

    Attributes:
        name: name of the row in the result table.
        path: file of prompts.
        limit: number of prompts to take, evenly spaced. null: all.
        turns: number of turns of each chat to play (MT-bench has two); the target answers the earlier ones.
    """

    name: str
    path: str
    limit: int | None = setting(None, ge=1)
    turns: int = setting(1, ge=1)


@dataclass
class Source:
    """One file, folder or archive of training text.

    Attributes:
        path: file, folder or archive.
        format: as `read_conversations`.
        max_conversations: stop after this many that are kept. null: all.
    """

    path: str
    format: Format = "auto"
    max_conversations: int | None = setting(None, ge=1)


@dataclass
class CorpusConfig:
    """Sources of a corpus, limits and filters.

    Attributes:
        sources: read in this order.
        max_length: longest example, in tokens. Default: training.row_length.
        validation_fraction: share of conversations held out, as whole chats.
        exclude: files of evaluation prompts; conversations that contain one are left out.
        deduplicate: keep only the first of several equal conversations.
        seed: of the split.
        processes: number of encoding processes; does not change the result.
    """

    sources: list[Source] = field(default_factory=list)
    max_length: int = setting(512, ge=2)
    validation_fraction: float = setting(0.02, ge=0, lt=1)
    exclude: list[str] = field(default_factory=list)
    deduplicate: bool = True
    seed: int = setting(0, ge=0)
    processes: int = setting(1, ge=1, metadata=_HOW_TO_RUN)

    def check(self) -> None:
        """Check ranges.

        Raises:
            UserError: a value is out of its range, or there are no sources.
        """
        _check_sources(self.sources, "corpus")
        check_ranges(self, "corpus")


@dataclass
class ServerConfig:
    """A server that generates (section `regenerate.server` of a recipe).

    Attributes:
        url: such as http://localhost:8000/v1; /v1 is added to a bare host.
        model: its name there. Default: the one model that the server lists.
        endpoint: "completions" sends token ids, so that the prompt is exactly the one that the drafter will
            be trained on; "chat" sends messages, for servers that take no token ids, and the server's own
            template renders them.
        concurrency: simultaneous requests.
        retries: how often a request is sent again after a temporary failure (429, 5xx, timeout, malformed
            reply).
        retry_wait_s: wait before the first retry; it doubles each time. A server's Retry-After is obeyed,
            up to ten minutes.
        timeout_s: longest time for one reply.
        seeds: send each request's seed. false for servers that refuse them (vLLM on CPU); sampled replies
            then differ if they are repeated.
        key_variable: environment variable of the API key, if the server requires one.
    """

    url: str = field(metadata=_HOW_TO_RUN)
    model: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    concurrency: int = setting(64, ge=1, metadata=_HOW_TO_RUN)
    retries: int = setting(6, ge=0, metadata=_HOW_TO_RUN)
    retry_wait_s: float = setting(1.0, ge=0, metadata=_HOW_TO_RUN)
    timeout_s: float = setting(600.0, gt=0, metadata=_HOW_TO_RUN)
    seeds: bool = True
    key_variable: str = field(default="OPENAI_API_KEY", metadata=_HOW_TO_RUN)


@dataclass
class RegenerateConfig:
    """Conversations that the target answers itself, and how (section `regenerate` of a recipe).

    Attributes:
        sources: conversations, as in `corpus.sources`; prompts without answers are enough.
        max_turns: user turns of a conversation that are answered.
        max_new_tokens: longest answer. One that is cut off there has no end-of-turn token.
        max_prompt_tokens: a conversation ends before the turn whose prompt is longer than this.
        greedy_fraction: share of conversations answered greedily; the others are sampled.
        temperature: of the sampled ones.
        top_p: of the sampled ones.
        seed: of the choice between the two and of each draw; a resumed run draws the same.
        deduplicate: skip conversations whose system and user turns have all occurred before.
        batch_rows: answers decoded together in process.
        max_cache_gb: memory for their keys and values (10^9 bytes), which limits batch_rows. null: half of
            the free memory on the GPU, 4 on a CPU.
        max_minutes: end after this many minutes with the answers so far. With a higher limit the same command
            answers the other conversations as well.
        max_rows: end after this many conversations, likewise; those of an interrupted run count.
        max_failed: share of conversations without an answer (NaN, refused requests) above which the run
            stops.
        keep_states: keep the hidden states of answers made in process for `hidden_states.mode: offline`.
        server: an OpenAI-compatible server that generates instead of this process.
    """

    sources: list[Source] = field(default_factory=list)
    max_turns: int = setting(4, ge=1)
    max_new_tokens: int = setting(512, ge=1)
    max_prompt_tokens: int = setting(1024, ge=1)
    greedy_fraction: float = setting(0.5, ge=0, le=1)
    temperature: float = setting(0.7, ge=0, lt=float("inf"))
    top_p: float = setting(0.95, gt=0, le=1)
    seed: int = setting(0, ge=0)
    deduplicate: bool = True
    batch_rows: int = setting(128, ge=1, metadata=_HOW_TO_RUN)
    max_cache_gb: float | None = setting(None, gt=0, metadata=_HOW_TO_RUN)
    max_minutes: float | None = setting(None, ge=0)
    max_rows: int | None = setting(None, ge=0)
    max_failed: float = setting(0.1, ge=0, le=1, metadata=_HOW_TO_RUN)
    keep_states: bool = field(default=False, metadata=_HOW_TO_RUN)
    server: ServerConfig | None = None

    def check(self) -> None:
        """Check ranges.

        Raises:
            UserError: a value is out of its range, or there are no sources.
        """
        _check_sources(self.sources, "regenerate")
        check_ranges(self, "regenerate")
        if self.server is not None:
            check_ranges(self.server, "regenerate.server")


def _check_sources(sources: list[Source], section: str) -> None:
    if not sources:
        raise UserError(f"{section}.sources: must not be empty; name a file, folder or archive")
    for source in sources:
        check_ranges(source, f"{section}.sources")
