"""`PipelineDecoder`: text in, text out, with a target that is spread over processes.

Every rank runs the same program and makes the same calls in the same order; torchrun numbers the ranks:

    from drafttrain import PipelineConfig, PipelineDecoder

    with PipelineDecoder(PipelineConfig(target="smollm2-135m-instruct", mode="pp")) as decoder:
        print(decoder.generate("Why is the sky blue?").text)
"""

import copy
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from drafttrain.bundle import find_bundle, is_plain_lm
from drafttrain.data.prompts import read_prompts
from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.causal_lm import as_drafter
from drafttrain.drafters.config import FILES, read_config
from drafttrain.drafters.model import DraftModel
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.session import DRAFT_SLOTS, NOT_FINITE
from drafttrain.inference.text import Prompt, TextStream, encode, is_batch
from drafttrain.kernels.machine import describe_machine
from drafttrain.kernels.team import native_team
from drafttrain.pipeline.baselines import pp, slm, stpp
from drafttrain.pipeline.config import PipelineConfig, balanced, head_in_blocks
from drafttrain.pipeline.distributed import Ranks
from drafttrain.pipeline.member import Layout, Member, Output, Pace, Request, own_device
from drafttrain.pipeline.part import (
    load_part,
    load_shell,
    require_frontier,
    sample_hash,
    stop_tokens,
    unmap,
)
from drafttrain.pipeline.probe import check_cut, probe, probe_ids, rounds
from drafttrain.pipeline.program import pipedec
from drafttrain.pipeline.simulate import Link
from drafttrain.pipeline.stage import Stage
from drafttrain.target_lm.loading import choose_dtype, load_config, load_tokenizer, resolve_target
from drafttrain.target_lm.model import FrozenTarget, block_number, max_positions
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.heap import trim_heap
from drafttrain.utils.provenance import versions
from drafttrain.utils.threads import usable_cores

SAFETENSORS = "*.safetensors"
ROOM = 2048  # tokens that KV caches are allocated for while prompts are not known
DTYPES = torch.float32, torch.bfloat16
MODES: dict[str, Callable] = {"pipedec": pipedec, "stpp": stpp, "pp": pp, "slm": slm}


@dataclass
class PipelineResult:
    """The output for one prompt.

    Attributes:
        text: the new text, without special tokens.
        token_ids: the new tokens, including a stop token.
        finish_reason: "stop" or "length".
        hits: new tokens that had been drafted.
        timesteps: timesteps of the pipeline after the prompt's prefill.
        seconds: wall time, prefill included.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    hits: int
    timesteps: int
    seconds: float


class PipelineDecoder:
    """One rank of a pipeline, connected to the others.

    Args:
        config: settings, the same at all ranks.
        rank: rank of this process; None: that of the environment variable RANK.

    Attributes:
        me: this rank's part of target and drafter.
        prompts: id and request of each prompt of the config's file.
        name, tokenizer, vocab_size, hidden_size: of the target.
        positions: most tokens of prompt and output (`max_positions`).

    Raises:
        UserError: target, drafter or prompts cannot be used, the ranks differ, or one of them is lost.
    """

    def __init__(self, config: PipelineConfig, rank: int | None = None):
        config.check()
        self.config, self.rank = config, _rank(config) if rank is None else rank
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or config.world_size)  # ranks on this machine
        self.threads = config.stages.threads or max(1, usable_cores() // here)
        if config.link is not None and here != config.world_size:
            raise UserError(
                f"link: must be null over several machines, whose clocks differ, got {config.link}; remove it"
            )
        self.place = local_target(config.target)
        target = load_config(self.place).get_text_config()
        self.vocab_size, self.hidden_size = target.vocab_size, target.hidden_size
        self.name, self.tokenizer = config.target, load_tokenizer(self.place)
        self.positions = max_positions(target)
        self.stop = stop_tokens(self.place, self.tokenizer.eos_token_id)
        self.prompts = list(self._read_prompts())
        longest = max((len(request.tokens) for _, request in self.prompts), default=ROOM)
        self.room = longest + config.max_new_tokens + DRAFT_SLOTS
        self._open = ExitStack()  # the settings of torch, until the end
        self._open.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(self.threads)
        self.ranks: Ranks | None = None
        with self._or_leave():
            own = choose_dtype(self.place, config.dtype, config.device, "decoding")
            # upper bound, states in fp32; a message is timed by its real size
            link = config.link and Link(config.link.gbit, config.link.ms / 1e3, 4 * self.hidden_size)
            self.ranks = Ranks(self.rank, config.world_size, config.timeout_s, link)
            # before loading, which takes long, and with other settings fails at some ranks and not at others
            self.ranks.agree("recipe and versions", fingerprint([asdict(config), versions()]))
            self.dtype = DTYPES[self.ranks.first([DTYPES.index(own)])[0]]
            self.me = load_member(config, self.place, self.dtype, self.rank, self.room)
        self.ranks.meet()
        with self._or_leave():
            self._compare()
        self.me.stage_pace, self.me.draft_pace = Pace.of_stages(config.pace), Pace.of_drafts(config.pace)
        if self._is_native:
            self._open.enter_context(native_team(self.threads))
        if config.stages.blocks == "measured":
            with self._or_leave():
                self._balance()
            self.ranks.meet()
        if config.probe:
            ids = probe_ids(self.place)
            found = self.ranks.channel().run(probe(self.me, ids))
            [rounding] = self.ranks.total([rounds(self.me)])
            check_cut(self.me, found, self.place, ids, rounding > 0, lambda: self.ranks.total([0]))

    @contextmanager
    def _or_leave(self) -> Iterator[None]:
        """Leave the other ranks, and torch's settings as they were, where the block raises a UserError."""
        try:
            yield
        except UserError:
            self._open.close()
            if self.ranks is not None:
                self.ranks.leave()
            raise

    def __enter__(self) -> "PipelineDecoder":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._open.close()
        if error is None:  # after an error others may be gone, or wait for something else
            self.ranks.close()

    @property
    def _is_native(self) -> bool:
        """Return whether the blocks of this rank run natively, or its drafter if it has none."""
        own = self.me.drafter if self.me.stage is None else self.me.stage.part
        return getattr(own, "native", None) is not None

    @property
    def blocks(self) -> list[int]:
        """Return the number of blocks of each stage."""
        return cut(self.config, load_config(self.place).get_text_config())

    def _compare(self) -> None:
        """Check that all ranks have the same models and prompts: hosts may differ in them.

        Raises:
            UserError: something differs.
        """
        for what, (folder, weights) in folders_of(self.config, self.place).items():
            self.ranks.agree(f"config of the {what}", fingerprint(read_json(folder / "config.json")))
            self.ranks.agree(f"weights of the {what}", sample_hash(folder, weights))
        given = [asdict(request) for _, request in self.prompts]
        self.ranks.agree("prompts and stop tokens", fingerprint([self.stop, given]))

    def _balance(self) -> None:
        """Reassign the blocks by measured speeds of the ranks, and load them; drafter and embeddings stay."""
        from drafttrain.pipeline.balance import measure_speeds, share_out

        config, me, before = self.config, self.me, self.blocks
        if config.mode == "pipedec":
            width, layers = config.width, config.layers
        else:  # a tree of stpp may have more nodes; a chain of its depth has the fewest
            width, layers = 1 + (parse_policy(config.tree).max_depth if config.mode == "stpp" else 0), 0
        speeds = measure_speeds(me, self.ranks, width, layers, self.hidden_size)
        found = share_out(before, me.layout, speeds)
        self.config = copy.deepcopy(config)
        self.config.stages.blocks = found
        if found == before:
            return
        paces, drafter, embeddings = (me.stage_pace, me.draft_pace), me.drafter, None
        if me.stage is not None and me.stage.part.is_first:
            embeddings = me.stage.part.base.embed_tokens.weight
        del self.me, me
        gc.collect()  # hooks refer to their stage: its weights would stay in memory with the new ones
        kept = drafter, embeddings
        self.me = load_member(self.config, self.place, self.dtype, self.rank, self.room, *kept)
        self.me.stage_pace, self.me.draft_pace = paces

    def recut(self, blocks: Sequence[int]) -> "PipelineDecoder":
        """Return a decoder on the same connection with other blocks per stage; this one stays loaded."""
        other = copy.copy(self)
        other.config = copy.deepcopy(self.config)
        other.config.stages.blocks = list(blocks)
        other.me = load_member(other.config, self.place, self.dtype, self.rank, self.room)
        other.me.stage_pace, other.me.draft_pace = self.me.stage_pace, self.me.draft_pace
        return other

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> PipelineResult | list[PipelineResult]:
        """Decode a prompt, or each prompt of a list in turn, with the output of the whole target on its own.

        Use `decode_all` for several prompts at a time (`concurrency`).

        Args:
            max_new_tokens, sampling: override those of the config.

        Raises:
            UserError: a prompt is empty or too long, the ranks got different prompts, or a rank is lost.
        """
        prompts = list(prompt) if is_batch(prompt) else [prompt]
        requests = [
            self.request(f"prompt {i}", encode(self, one), max_new_tokens, sampling)
            for i, one in enumerate(prompts)
        ]
        self.ranks.agree("prompts", fingerprint([asdict(request) for request in requests]))
        results = []
        for request in requests:
            started = time.perf_counter()
            output = self.decode(self.config.mode, request)
            seconds = time.perf_counter() - started
            if self.config.mode == "pipedec":  # only the drafter's rank counts them
                [output.hits] = self.ranks.total([output.hits])
            text = TextStream(self.tokenizer)
            results.append(
                PipelineResult(
                    text.push(output.tokens) + text.flush(),
                    output.tokens,
                    "stop" if output.tokens[-1] in self.stop else "length",
                    output.hits,
                    output.timesteps,
                    seconds,
                )
            )
        return results if is_batch(prompt) else results[0]

    def request(
        self,
        name: str,
        tokens: Sequence[int],
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> Request:
        """Return the request for a prompt's tokens, with the limits, sampling and tree of the config.

        Args:
            name: name of the prompt in error messages.

        Raises:
            UserError: the prompt is empty or too long for the target, or the limit is below 1.
        """
        config = self.config
        sampling = sampling or SamplingParams(**asdict(config.sampling))
        limit = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        limit = sampling.max_tokens or limit
        if limit < 1:
            raise UserError(f"max_new_tokens: must be at least 1, got {limit}")
        if not tokens:
            raise UserError(f"{name}: must have at least one token, got none")
        if len(tokens) + limit > self.positions:
            raise UserError(
                f"{name}: prompt and new tokens must fit into the {self.positions} positions of "
                f"{config.target}, got {len(tokens)} + {limit}; remove it or lower max_new_tokens"
            )
        depth = parse_policy(config.tree).max_depth
        tree = config.width, config.children, depth, config.layers, config.best_first
        return Request(tokens, limit, self.stop, sampling, *tree)

    def decode(self, mode: str, request: Request) -> Output:
        """Decode a request in one of `MODES`.

        Raises:
            UserError: another rank is lost, or the logits are not finite.
        """
        return self._checked(self.ranks.channel().run(MODES[mode](self.me, request)))

    def decode_all(self, mode: str, requests: Sequence[Request], at_once: int) -> list[Output]:
        """Decode prompts, `at_once` of them at the same time: while one waits for a stage, others use it.

        Raises:
            UserError: as `decode`.
        """
        if at_once == 1 or mode == "pipedec":  # one prompt keeps all stages busy
            return [self.decode(mode, request) for request in requests]
        members = [self.me.twin() for _ in range(at_once)]
        outputs: list[Output | None] = [None] * len(requests)

        def work(turn: int) -> None:
            with native_team(self.threads) if self._is_native else nullcontext():
                for i in range(turn, len(requests), at_once):
                    program = MODES[mode](members[turn], requests[i])
                    outputs[i] = self._checked(self.ranks.channel(turn + 1).run(program))

        with ThreadPoolExecutor(at_once) as pool:
            for done in [pool.submit(work, turn) for turn in range(at_once)]:
                done.result()
        return outputs

    def paced(self) -> tuple[float, float]:
        """Return how many pieces of work had a declared time, over all ranks, and how many took longer."""
        paces = self.me.stage_pace, self.me.draft_pace
        held, late = self.ranks.total([sum(pace.held for pace in paces), sum(pace.late for pace in paces)])
        return held, late

    def machine(self) -> dict[str, Any]:
        """Describe this machine, as one rank uses it."""
        found = describe_machine(self.me.device, self.dtype, native=self._is_native)
        return {**found, "threads": self.threads}

    def _checked(self, output: Output) -> Output:
        if output.tokens[-1] == NOT_FINITE:
            raise UserError(
                f"rank {self.rank}: {self.name}: logits must be finite, got NaN or infinite ones; see that "
                "its files are not damaged, or set dtype: float32"
            )
        return output

    def _read_prompts(self) -> Iterator[tuple[str, Request]]:
        if self.config.prompts is None:
            return
        for prompt in read_prompts(self.config.prompts, self.config.limit):
            yield prompt.id, self.request(prompt.id, prompt.token_ids(self.tokenizer))


def local_target(name: str) -> str:
    """Return the local folder of a target, downloaded once from the Hub: ranks read parts of its files.

    Raises:
        UserError: there is no such target.
    """
    place = resolve_target(name)
    if os.path.isdir(place):
        return place
    from drafttrain.hub import download_target  # for targets that are not a folder here

    return str(download_target(place))


def _rank(config: PipelineConfig) -> int:
    """Return this process's rank from the environment variables that torchrun sets.

    Raises:
        UserError: RANK is not set, or there are not as many processes as the config asks for.
    """
    found = []
    for name in ("RANK", "WORLD_SIZE"):
        given = os.environ.get(name, "")
        if not given.isdecimal():
            remedy = "start the program with torchrun; as a recipe on one machine, unset both"
            raise UserError(f"{name}: must be a number beside the other, got {given or 'nothing'}; {remedy}")
        found.append(int(given))
    rank, world_size = found
    if world_size != config.world_size:
        raise UserError(f"WORLD_SIZE: must be {config.world_size}, as the recipe's stages, got {world_size}")
    return rank


def load_member(
    config: PipelineConfig,
    place: str,
    dtype: torch.dtype,
    rank: int,
    room: int,
    drafter: DraftModel | None = None,
    embeddings: torch.Tensor | None = None,
) -> Member:
    """Load a rank's blocks of the target and, on the rank that drafts, the drafter.

    Args:
        room: tokens that KV caches are allocated for; growing them later takes time.
        drafter, embeddings: the drafter and the target's embeddings [V, H], if this rank has them already.

    Raises:
        UserError: the target cannot be cut so, or the drafter does not fit it or keeps no tree in flight.
    """
    target = load_config(place).get_text_config()
    blocks, layout = cut(config, target), layout_of(config)
    ends = [sum(blocks[: i + 1]) for i in range(len(blocks))]
    n_blocks, stored = target.num_hidden_layers, _stored_drafter(config)
    vocabulary = stored.get("draft_vocab_size", config.children)
    if config.children > vocabulary:
        raise UserError(f"children: must be <= {vocabulary}, the drafter's vocabulary, got {config.children}")
    taps = [block_number(block, n_blocks) for block in stored.get("tapped_blocks", [])]
    if config.mode == "slm" and not is_plain_lm(config.drafter):
        raise UserError(
            f"drafter: must be a small LM for mode slm, got {config.drafter}, which cannot write alone; name "
            "the folder of one"
        )
    device = own_device(config.device)
    owners = [next(r for r, end in zip(layout.stages, ends) if tap < end or end == n_blocks) for tap in taps]
    stage = None
    if rank in layout.stages:
        i = layout.stages.index(rank)
        own, shared = range(ends[i] - blocks[i], ends[i]), []
        part = load_part(place, own, dtype, taps=taps, device=device)
        if embeddings is not None:
            part.base.embed_tokens.weight = torch.nn.Parameter(embeddings, requires_grad=False)
            shared = [embeddings]
        part.pack(shared)
        stage = Stage(part, room)
    if drafter is None and config.drafts and rank == layout.drafter:
        embeddings = stage and stage.part.base.embed_tokens.weight
        drafter = _drafter(config, load_shell(place, dtype, embeddings, device), embeddings)
    trim_heap()  # packing leaves tens of megabytes free below what is in use
    policy = parse_policy(config.tree) if drafter else None
    return Member(rank, layout, stage, drafter, policy, list(zip(taps, owners)), room)


def cut(config: PipelineConfig, target: PreTrainedConfig) -> list[int]:
    """Return the number of blocks of each rank.

    Raises:
        UserError: there are too few blocks, or the given numbers do not add up.
    """
    n_blocks = target.num_hidden_layers
    blocks = config.stages.blocks
    if blocks in (None, "measured"):  # which starts from these
        blocks = balanced(n_blocks, config.stages.ranks, head_in_blocks(target))
    if sum(blocks) != n_blocks:
        raise UserError(
            f"stages.blocks: must add up to the {n_blocks} blocks of {config.target}, got {blocks}"
        )
    return blocks


def layout_of(config: PipelineConfig) -> Layout:
    """Return which ranks have blocks, in which groups; rank 0 drafts."""
    alone = config.drafter_rank == "alone"
    ranks = list(range(alone, config.stages.ranks + alone))
    sizes = config.stages.groups or [1] * len(ranks)
    return Layout(tuple(tuple(ranks[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))))


def folders_of(config: PipelineConfig, place: str) -> dict[str, tuple[Path, str]]:
    """Return the folders of the target, `place`, and of the drafter, each with the glob pattern of its weight
    files."""
    found = {"target": (Path(place), SAFETENSORS)}
    if config.drafts and is_plain_lm(config.drafter):
        found["drafter"] = Path(resolve_target(config.drafter)), SAFETENSORS
    elif config.drafts:
        found["drafter"] = find_bundle(config.drafter), FILES[1]  # the folder may also hold a classifier
    return found


def _stored_drafter(config: PipelineConfig) -> Mapping[str, Any]:
    """Return what every rank needs to know of the drafter's config; empty without a drafter."""
    if not config.drafts:
        return {}
    if is_plain_lm(config.drafter):
        lm = load_config(resolve_target(config.drafter)).get_text_config()
        return {"draft_vocab_size": lm.vocab_size}
    return read_config(find_bundle(config.drafter))


def _drafter(config: PipelineConfig, shell: FrozenTarget, embeddings: torch.Tensor | None) -> DraftModel:
    if is_plain_lm(config.drafter):
        drafter = as_drafter(config.drafter, shell)
    else:
        drafter = load_drafter(find_bundle(config.drafter), shell, shell.dtype)
    require_frontier(drafter, config.drafter)
    drafter.pack()
    if shell.device.type == "cpu":  # else nothing is mapped
        unmap(drafter, [] if embeddings is None else [embeddings])
    return drafter
