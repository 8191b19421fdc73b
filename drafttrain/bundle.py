"""Bundles: a drafter with everything that decoding with it needs, in one folder or on the Hub."""

import os
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from drafttrain.bundle_files import CALIBRATION, CLASSIFIER, EVALUATION, SELF_DRAFT, read_evaluation
from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.config import PREFIX, drafter_folder, read_config
from drafttrain.drafters.model import DraftModel
from drafttrain.inference.proposer import Proposer, TreeProposer
from drafttrain.target_lm.loading import load_for_decoding
from drafttrain.target_lm.model import FrozenTarget, weights_hash
from drafttrain.trees.parse import parse_policy, takes_costs, uses_calibration
from drafttrain.trees.policies import NGRAM, WITH_NGRAMS, drafter_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json

if TYPE_CHECKING:  # a bundle without them does not import them
    from drafttrain.calibration.calibration import Calibration
    from drafttrain.classifier.model import Classifier
    from drafttrain.self_draft.proposer import SelfDraft
    from drafttrain.trees.costs import Costs


@dataclass
class Bundle:
    """A loaded bundle.

    Attributes:
        target: the frozen target.
        drafter: the drafter, attached to this target.
        tree: the growth policy, `ngram` or `ngram+POLICY` that was fastest in the evaluation.
        calibration: the measured costs of drafting and verifying; None without one.
        fingerprints: hashes of "target" and "drafter".
        classifier: for the trees of C2T; None without one.
        ngrams: Self-Draft with the bundle's n-gram cache; None without one.
        name: the folder or Hub id that it was loaded from.
        is_given: whether the caller passed the calibration, which is then used on any machine.
    """

    target: FrozenTarget
    drafter: DraftModel
    tree: str
    calibration: "Calibration | None"
    fingerprints: dict[str, str]
    classifier: "Classifier | None" = None
    ngrams: "SelfDraft | None" = None
    name: str = "BUNDLE"
    is_given: bool = False
    _here: "Calibration | None" = field(default=None, repr=False)  # short calibration, made on first use

    def proposer(self, tree: str | None = None) -> Proposer:
        """Return the proposer of a tree, by default the fastest: a growth policy, `ngram` or `ngram+POLICY`.

        Raises:
            UserError: no such policy, or it needs a calibration or a classifier and there is none.
        """
        policy = drafter_policy(tree := tree or self.tree)
        ngrams = None if policy == tree else self.ngrams or _self_draft(self.target)
        if tree == NGRAM:
            return ngrams
        used, costs = self.calibration_for(policy), self.costs_for(policy)
        others = WITH_NGRAMS if ngrams is None else ()
        drafter = TreeProposer(self.drafter, parse_policy(policy, costs, self.classifier, others))
        if ngrams is None:
            return drafter
        from drafttrain.self_draft.hybrid import hybrid_proposer  # for these trees only

        is_here = self.is_given or (used is not None and not used.foreign(self.target, self.fingerprints))
        return hybrid_proposer(ngrams, drafter, costs, is_here)

    @property
    def costs(self) -> "Costs | None":
        """Return the costs of the stored calibration, without C2T thresholds tuned for another classifier."""
        return None if self.calibration is None else self._costs_of(self.calibration)

    def costs_for(self, policy: str) -> "Costs | None":
        """Return the costs for a growth policy on this machine; None without a calibration."""
        calibration = self.calibration_for(policy)
        return None if calibration is None else self._costs_of(calibration)

    def calibration_for(self, policy: str) -> "Calibration | None":
        """Return the calibration for a growth policy on this machine.

        This is the stored calibration. If the policy needs one and the stored one is missing or was made on
        another machine, in another dtype or for another drafter, it is a short calibration of this machine,
        from the user's cache or measured now. A calibration that the caller passed is always used.

        Raises:
            UserError: the policy needs one, and this kind of drafter can have none.
        """
        stored, policy = self.calibration, drafter_policy(policy)
        if self.is_given or not takes_costs(policy):
            return stored
        from drafttrain.trees.costs import EXAMPLE_COSTS  # lazy: other policies do without

        if not uses_calibration(policy, self.costs or EXAMPLE_COSTS):
            return stored
        if self.drafter.max_depth is not None and stored is None:
            raise UserError(
                f"tree {policy!r}: must not depend on what depth costs, which is nothing with the heads of "
                f"{self.name}; name another, such as chain:length=3"
            )
        if self.drafter.max_depth is not None or self.target.tokenizer is None:
            return stored  # no cost by depth, or no prompts to measure with
        problem = "there is no calibration"
        if stored is not None:
            problem = stored.foreign(self.target, self.fingerprints)
        if problem is None:
            return stored
        if self._here is None:
            parse_policy(policy, EXAMPLE_COSTS, self.classifier)  # reports wrong settings before measuring
            from drafttrain.calibration.quick import calibration_here  # lazy: imports the reader of prompts

            made = self.target, self.drafter, self.fingerprints
            self._here = calibration_here(*made, f"{self.name}: {problem}", stored, self.classifier)
        return self._here

    def _costs_of(self, calibration: "Calibration") -> "Costs":
        made_for, costs = calibration.made_for.get("classifier"), calibration.costs
        own = self.classifier is not None and made_for == weights_hash(self.classifier)
        return costs if own else replace(costs, beta=None, expand=None, top_k=None)

    def warning(self, tree: str | None = None) -> str | None:
        """Return one line if the tree's timings are of another machine, dtype or model, else None."""
        policy = drafter_policy(tree := tree or self.tree)
        is_used, used = uses_calibration(policy, self.costs_for(policy)), self.calibration_for(policy)
        if policy != tree and not is_used and self.ngrams is not None and self.ngrams.warning:
            return self.ngrams.warning
        if used is None or not is_used:
            return None
        problem = used.foreign(self.target, self.fingerprints)
        return problem and (
            f"{problem}: trees may be of a wrong size; measure again: drafttrain calibrate "
            f"{shlex.quote(self.name)} --prompts FILE writes into the bundle, and with --out DIR what can be "
            "given as its calibration"
        )


def find_bundle(path: str | os.PathLike) -> Path:
    """Return the folder of a bundle, given its path or its Hub id (`user/name`, `user/name@branch`); a bundle
    on the Hub is downloaded once.

    Raises:
        UserError: there is no such bundle.
    """
    folder = drafter_folder(path)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise UserError(f"{folder}: no config.json there; give the folder that `drafttrain export` wrote")
        return folder
    from drafttrain.hub import download_bundle  # for bundles on the Hub

    return download_bundle(str(path))


def is_plain_lm(path: str | os.PathLike) -> bool:
    """Return whether this is the folder or the .gguf file of a language model, not of a drafter."""
    if Path(path).suffix.lower() == ".gguf":
        return True
    if not (Path(path) / "config.json").exists():
        return False
    config = read_json(Path(path) / "config.json")
    return isinstance(config, dict) and not str(config.get("model_type")).startswith(PREFIX)


def load_bundle(
    path: str | os.PathLike,
    target: FrozenTarget | str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    calibration: "Calibration | str | os.PathLike | None" = None,
    own_calibration: bool = True,
    classifier: str | os.PathLike | None = None,
    own_classifier: bool = True,
    ngrams: str | os.PathLike | None = None,
) -> Bundle:
    """Load a bundle (or the folder of a trained drafter) with its target, for decoding.

    Args:
        path: folder or Hub id; or the folder of a small LM with the target's tokens, which drafts untrained.
        target: a loaded target, or its name as for `load_target`. None: the one that the bundle names.
        dtype, device: of a target that is loaded here, as for `load_target`; the drafter gets the target's.
        calibration: a calibration, its file or its folder, used on any machine. None: the bundle's own.
        own_calibration, own_classifier: read the bundle's own; False if it is about to be replaced.
        classifier: folder of a classifier. None: the bundle's own.
        ngrams: folder of an n-gram cache or of settings of Self-Draft. None: the bundle's own.

    Raises:
        UserError: no bundle, damaged, or made for another target.
    """
    small = is_plain_lm(path)
    folder = Path(path) if small else find_bundle(path)
    name = None if small else read_config(folder)["target"].get("name")
    if not isinstance(target, FrozenTarget):
        if target is None and name is None:
            problem = "is a small LM, which drafts for any target" if small else "no target in config.json"
            raise UserError(f"{folder}: {problem}; name one with --target")
        try:
            target = load_for_decoding(target or name, dtype=dtype, device=device)
        except UserError as error:
            if target is not None or str(error).startswith(("dtype:", "device")):
                raise
            raise UserError(
                f"{folder}: its target cannot be loaded ({error}); name one with `target` (--target on the "
                "command line)"
            ) from None
    if small:
        from drafttrain.drafters.causal_lm import as_drafter  # for small LMs

        drafter = as_drafter(path, target)
    else:
        drafter = load_drafter(folder, target, dtype=target.dtype)
    fingerprints = {"target": target.fingerprint, "drafter": weights_hash(drafter)[:16]}
    drafter.pack()
    is_given = calibration is not None
    results = read_evaluation(folder / EVALUATION) or {}
    if calibration is None and own_calibration and (folder / CALIBRATION).exists():
        calibration = folder
    if isinstance(calibration, str | os.PathLike):
        from drafttrain.calibration.calibration import Calibration  # for bundles that have one

        calibration = Calibration.load(calibration)
    if classifier is None and own_classifier and (folder / CLASSIFIER).exists():
        classifier = folder
    loaded = None
    if classifier is not None:
        from drafttrain.classifier.model import Classifier  # for bundles that have one

        loaded = Classifier.load(classifier).to(target.device)
    if ngrams is None and any((folder / name).is_file() for name in SELF_DRAFT):
        ngrams = folder
    self_draft = None if ngrams is None else _self_draft(target, ngrams)
    tree = results.get("tree") or f"chain:length={min(4, drafter.max_depth or 4)}"  # not evaluated yet
    parts = target, drafter, tree, calibration, fingerprints, loaded, self_draft
    return Bundle(*parts, str(path), is_given)


def _self_draft(target: FrozenTarget, folder: str | os.PathLike | None = None) -> "SelfDraft":
    from drafttrain.self_draft.settings import load_self_draft  # for trees with n-grams

    return load_self_draft(target, folder)
