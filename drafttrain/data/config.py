"""Settings of the corpus stage and of the regeneration stage."""

from dataclasses import dataclass, field
from typing import Any, Literal

from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting

Format = Literal["auto", "sharegpt", "messages", "alpaca", "text", "oanc"]
HUB = "hub:"  # prefix of prompt sets that are read from the Hugging Face Hub
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
        format: format of the rows. "auto": recognized by the file name and the keys of each row.
        max_conversations: stop after keeping this many conversations. null: all.
    """

    path: str
    format: Format = "auto"
    max_conversations: int | None = setting(None, ge=1)


@dataclass
class CorpusConfig:
    """Sources of a corpus, limits and filters.

    Attributes:
        sources: files, folders and archives of training text, read in this order.
        max_length: longest example, in tokens. Default: training.row_length.
        validation_fraction: share of conversations held out, as whole chats.
        exclude: files of evaluation prompts; conversations that contain one are left out.
        deduplicate: keep only the first of several equal conversations.
        seed: seed of the split into training and validation.
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
        """Validate the ranges.

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
        model: name of the model on the server. Default: the only one that the server lists.
        endpoint: "completions" sends token ids, so that the prompt is exactly the one that the drafter will
            be trained on; "chat" sends messages, for servers that take no token ids, and the server's own
            template renders them.
        concurrency: number of requests sent at the same time.
        retries: how often a request is sent again after a temporary failure (429, 5xx, timeout, malformed
            reply).
        retry_wait_s: seconds before the first retry, doubled for each further one. A Retry-After header of
            the server is obeyed, up to ten minutes.
        timeout_s: longest time to wait for a reply, in seconds.
        seeds: send a seed with each request. false for servers that refuse seeds (vLLM on CPU): a repeated
            request then gets another sampled reply.
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
        sources: as in `corpus.sources`; answers are not needed, and max_conversations counts what is read.
        max_turns: number of user turns that are answered in each conversation.
        max_new_tokens: longest answer, in tokens. One that is cut off there has no end-of-turn token.
        max_prompt_tokens: a conversation ends before the turn whose prompt is longer than this.
        greedy_fraction: share of conversations answered greedily; the others are sampled.
        temperature: temperature of the sampled conversations.
        top_p: top-p of the sampled conversations.
        seed: decides which conversations are sampled, and every sampled token; a resumed run draws the same.
        deduplicate: skip conversations with the same system and user turns as an earlier one.
        batch_rows: number of answers decoded together, without a server.
        max_cache_gb: memory for their KV cache (10^9 bytes), which limits batch_rows. null: half of the free
            memory on the GPU, 4 on a CPU.
        max_minutes: stop after this many minutes and keep the answers so far. The same command with a higher
            limit continues with the other conversations.
        max_rows: stop after this many conversations, likewise; those of an interrupted run count.
        max_failed: share of conversations without an answer (NaN, refused requests) above which the run
            stops.
        keep_states: keep hidden states of answers made without a server for `hidden_states.mode: offline`.
        server: an OpenAI-compatible server that generates the answers instead of this process.
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
        """Validate the ranges.

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
