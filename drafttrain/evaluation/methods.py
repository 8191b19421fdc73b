"""The methods that a benchmark compares: drafters from bundles and what needs no training, all on one
target."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.data.chat import tokenizer_hash
from drafttrain.evaluation.benchmark_config import ASSISTANT, LOOKAHEAD, PROMPT_LOOKUP, MethodSpec
from drafttrain.evaluation.measure import Method, autoregressive, drafting, transformers_generate
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, TRANSFORMERS
from drafttrain.evaluation.proposers import find_drafter
from drafttrain.evaluation.stock import Stock, convert
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import Proposer
from drafttrain.self_draft.lookahead import Lookahead
from drafttrain.self_draft.prompt_lookup import PromptLookup
from drafttrain.self_draft.settings import load_self_draft
from drafttrain.target_lm.loading import load_tokenizer
from drafttrain.target_lm.model import FrozenTarget, weights_hash
from drafttrain.target_lm.stock import load_model_like
from drafttrain.trees.parse import uses_calibration
from drafttrain.trees.policies import NGRAM, drafter_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint
from drafttrain.utils.provenance import content_hash

LOOKAHEAD_SIZES = {"window": 9, "gram": 5, "verified": 3}  # 48 tokens in flight
DECIDING = (".json", ".safetensors", ".bin")  # files of a bundle that decoding depends on


class Methods:
    """All methods of a benchmark on one target, loaded once. Methods from the same bundle share its weights.

    Args:
        target: loaded for decoding. Methods tap it as they need, each before it runs.
        specs: what to compare with plain decoding.
        stock: the target's model as transformers loads it; assistants get its dtype.

    Attributes:
        described: description of each method, for the record.
        identity: fingerprint of what each method's measurements depend on.
        warnings: about bundles whose calibration was made for something else.

    Raises:
        UserError: a bundle or model cannot be loaded, belongs to another target, or has no such tree.
    """

    def __init__(self, target: FrozenTarget, specs: Sequence[MethodSpec], stock: Stock):
        self.target, self.stock = target, stock.model
        self.described: dict[str, Any] = {AUTOREGRESSIVE: {}, TRANSFORMERS: stock.describe()}
        self.identity: dict[str, str] = {}
        self.warnings: list[str] = []
        self._proposers: dict[str, tuple[Proposer, Sequence[int]]] = {}  # with the blocks that each reads
        self._assistants: dict[str, PreTrainedModel] = {}
        bundles: dict[str, tuple[Bundle, list[int], str]] = {}
        for spec in specs:
            if spec.source is None:
                proposer, settings = self._without_files(spec.name)
                self._proposers[spec.name] = proposer, ()
                self.described[spec.name] = settings
                self.identity[spec.name] = fingerprint([spec.name, settings])
            elif spec.name == ASSISTANT:
                self._assistants[spec.name] = self._load_assistant(spec.source)
                self.identity[spec.name] = weights_hash(self._assistants[spec.name])[:16]
                self.described[spec.name] = {"model": spec.source}
            else:
                if spec.source not in bundles:
                    bundles[spec.source] = self._load_bundle(spec.source)
                self._add_bundle(spec, *bundles[spec.source])

    def at(self, sampling: SamplingParams) -> dict[str, Method]:
        """Return the methods by name, plain decoding first; temperature 0 is greedy."""
        target, options = self.target, {"model": self.stock, "sampling": sampling}
        methods = {
            AUTOREGRESSIVE: autoregressive(target, sampling, taps=()),
            TRANSFORMERS: transformers_generate(target, **options),
        }
        for name in list(self.described)[2:]:
            if name in self._assistants:
                methods[name] = transformers_generate(
                    target, assistant_model=self._assistants[name], **options
                )
            else:
                proposer, taps = self._proposers[name]
                methods[name] = drafting(target, proposer, sampling, taps)
        return methods

    def _without_files(self, name: str) -> tuple[Proposer, dict[str, Any]]:
        """Return a proposer that needs no training, and its settings."""
        if name == PROMPT_LOOKUP:
            lookup = PromptLookup()
            return lookup, asdict(lookup)
        if name == LOOKAHEAD:
            return Lookahead(**LOOKAHEAD_SIZES, vocab_size=self.target.vocab_size), LOOKAHEAD_SIZES
        ngrams = load_self_draft(self.target)
        return ngrams, asdict(ngrams.config)

    def _load_assistant(self, source: str) -> PreTrainedModel:
        model, tokenizer = load_model_like(source, self.target), load_tokenizer(source)
        if tokenizer_hash(tokenizer) != tokenizer_hash(self.target.tokenizer):
            raise UserError(f"{source}: has another tokenizer than {self.target.name}; it cannot assist it")
        own, theirs = (one.config.get_text_config().vocab_size for one in (model, self.target.model))
        if own != theirs:  # transformers takes them for other tokenizers
            raise UserError(
                f"{source}: must have {theirs} rows of embeddings as {self.target.name}, got {own}; "
                "transformers cannot assist with it"
            )
        return convert(model, self.stock.dtype)

    def _load_bundle(self, source: str) -> tuple[Bundle, list[int], str]:
        """Return a bundle, or a small LM that drafts unchanged, the blocks that its drafter reads, and a
        fingerprint of its files."""
        folder = find_drafter(source)
        self.target.tap(())  # so that the blocks that are tapped afterwards are this drafter's
        bundle = load_bundle(folder, self.target)
        files = [folder] if folder.is_file() else [one for one in folder.iterdir() if one.suffix in DECIDING]
        made_from = fingerprint({file.name: content_hash(file) for file in files})
        return bundle, list(self.target.tapped_blocks), made_from

    def _add_bundle(self, spec: MethodSpec, bundle: Bundle, taps: list[int], made_from: str) -> None:
        self.target.tap(taps)  # a short calibration decodes
        try:
            proposer = bundle.proposer(spec.tree)
        except UserError as error:
            raise UserError(f"method {spec.name}: {error}") from None
        tree = spec.tree or bundle.tree
        if warning := bundle.warning(tree):
            self.warnings.append(f"{spec.name}: {warning}")
        self._proposers[spec.name] = proposer, () if tree == NGRAM else taps
        self.identity[spec.name] = fingerprint([made_from, tree, *costs_of(bundle, tree)])
        self.described[spec.name] = {"bundle": spec.source, "tree": tree, "fingerprint": made_from}


def costs_of(bundle: Bundle, tree: str) -> list[str]:
    """Return the costs that a tree depends on, for a fingerprint, as a machine may measure them again; empty
    if it depends on none."""
    policy = drafter_policy(tree)
    costs = bundle.costs_for(policy) if policy else None
    is_joined = policy != tree  # by the expected acceptance of the drafter's nodes
    return [repr(costs)] if costs is not None and (is_joined or uses_calibration(policy, costs)) else []
