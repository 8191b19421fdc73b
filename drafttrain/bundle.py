"""A bundle: a drafter with what decoding with it takes, in one folder or on the Hub."""

import os
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from drafttrain.bundle_files import CONTENTS, EVALUATION, README, WEIGHTS, read_evaluation
from drafttrain.calibration.calibration import FILE as CALIBRATION
from drafttrain.calibration.calibration import Calibration
from drafttrain.classifier.model import FILE as CLASSIFIER
from drafttrain.classifier.model import Classifier
from drafttrain.drafters.auto import load_drafter
from drafttrain.drafters.config import drafter_folder, read_config
from drafttrain.drafters.model import DraftModel
from drafttrain.inference.proposer import Proposer, TreeProposer
from drafttrain.self_draft.hybrid import HybridProposer
from drafttrain.self_draft.proposer import SelfDraft
from drafttrain.self_draft.settings import holds_self_draft, load_self_draft
from drafttrain.target_lm.loading import load_for_decoding
from drafttrain.target_lm.model import FrozenTarget, weights_hash
from drafttrain.trees.costs import EXAMPLE_COSTS, Costs
from drafttrain.trees.parse import parse_policy, uses_calibration
from drafttrain.utils.errors import UserError, brief
from drafttrain.utils.files import fingerprint
from drafttrain.utils.provenance import content_hash

NGRAM = "ngram"  # for Self-Draft, alone or before a + and a growth policy
DEFAULT_TREE = "chain:length=4"  # for a drafter that has not been measured yet


@dataclass
class Bundle:
    """What decoding takes.

    Attributes:
        target: the frozen target.
        drafter: which reads it.
        tree: the growth policy that was fastest when measured, as `parse_policy` reads it.
        calibration: what drafting and verifying cost; None where nothing was calibrated.
        fingerprints: of "target" and "drafter".
        classifier: for the trees of C2T; None where none was trained.
        ngrams: Self-Draft with the bundle's n-gram cache; None where it has none.
        name: the folder or Hub id that it was loaded from.
        is_given: whether the calibration was named by the caller, who wants it wherever it was made.
    """

    target: FrozenTarget
    drafter: DraftModel
    tree: str
    calibration: Calibration | None
    fingerprints: dict[str, str]
    classifier: Classifier | None = None
    ngrams: SelfDraft | None = None
    name: str = "BUNDLE"
    is_given: bool = False
    _here: Calibration | None = field(default=None, repr=False)  # the short one, once it was needed

    def proposer(self, tree: str | None = None) -> Proposer:
        """The drafter with a growth policy, by default the fastest. `ngram` drafts without it, out of n-grams
        alone; `ngram+` before a policy joins both in one tree.

        Raises:
            UserError: no such policy, or it takes a calibration or a classifier and there is none.
        """
        first, plus, rest = (tree or self.tree).partition("+")
        if first != NGRAM:
            others = (NGRAM, f"{NGRAM}+POLICY")  # can be named here, and nowhere else
            costs = self.costs_for(tree or self.tree)
            policy = parse_policy(tree or self.tree, costs, self.classifier, others)
            return TreeProposer(self.drafter, policy)
        ngrams = self.ngrams or load_self_draft(self.target)
        if not plus:
            return ngrams
        policy = parse_policy(rest, self.costs_for(rest), self.classifier)
        return HybridProposer(ngrams, TreeProposer(self.drafter, policy))

    @property
    def costs(self) -> Costs | None:
        """What was calibrated, less thresholds for another classifier."""
        return None if self.calibration is None else self._costs_of(self.calibration)

    def costs_for(self, policy: str) -> Costs | None:
        """Return the costs that a growth policy goes by here; None if there are none and it needs none."""
        found = self.calibration_for(policy)
        return None if found is None else self._costs_of(found)

    def calibration_for(self, policy: str) -> Calibration | None:
        """Return the calibration that a growth policy goes by here.

        That is the stored one, unless the policy takes something of it and it is missing or was made on
        another machine, in another dtype or for another drafter: then it is the short one of this machine,
        which is made now if the user's cache does not have it. One that the caller named is used as it is.
        """
        stored = self.calibration
        if not uses_calibration(policy, self.costs or EXAMPLE_COSTS) or self.is_given:
            return stored
        if self.drafter.max_depth is not None or self.target.tokenizer is None:
            return stored  # no cost by depth, or no prompts to measure with
        problem = "there is no calibration"
        if stored is not None:
            problem = stored.foreign(self.target.device, self.target.dtype, self.fingerprints)
        if problem is None:
            return stored
        if self._here is None:
            parse_policy(policy, EXAMPLE_COSTS, self.classifier)  # a wrong setting is no reason to measure
            from drafttrain.calibration.quick import calibration_here  # and what reads prompts

            made = self.target, self.drafter, self.fingerprints
            self._here = calibration_here(*made, f"{self.name}: {problem}", stored, self.classifier)
        return self._here

    def _costs_of(self, calibration: Calibration) -> Costs:
        made_for, costs = calibration.made_for.get("classifier"), calibration.costs
        own = self.classifier is not None and made_for == weights_hash(self.classifier)
        return costs if own else replace(costs, beta=None, expand=None, top_k=None)

    def proposers(self, trees: Sequence[str]) -> dict[str, Proposer]:
        """The drafter with each of several growth policies. One that cannot be used here (PCT with a drafter
        slower than its target) is left out with a warning.

        Raises:
            UserError: none can be used.
        """
        found, problem = {}, None
        for tree in trees:
            try:
                found[tree] = self.proposer(tree)
            except UserError as error:
                problem = error
                warnings.warn(f"{tree} is left out: {error}", stacklevel=2)
        if problem and not found:
            raise problem
        return found

    def warning(self, tree: str | None = None) -> str | None:
        """Says in one line if the policy goes by a calibration of something else, and how to redo it."""
        policy = (tree or self.tree).removeprefix(f"{NGRAM}+")
        if (tree or self.tree).startswith(NGRAM) and self.ngrams is not None and self.ngrams.warning:
            return self.ngrams.warning
        used = self.calibration_for(policy)
        if used is None or not uses_calibration(policy, self.costs_for(policy)):
            return None
        problem = used.foreign(self.target.device, self.target.dtype, self.fingerprints)
        return problem and (
            f"{problem}: trees may be of a wrong size; measure again: drafttrain calibrate "
            f"{shlex.quote(self.name)} --prompts FILE writes into the bundle, and with --out DIR what can be "
            "given as its calibration"
        )


def find_bundle(path: str | os.PathLike) -> Path:
    """The folder of a bundle given by its path or Hub id, downloaded once; `user/name@branch` names a branch.

    Raises:
        UserError: there is none.
    """
    folder = drafter_folder(path)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise UserError(f"{folder}: no config.json there; give the folder that `drafttrain export` wrote")
        return folder
    repo, _, revision = str(path).partition("@")
    try:
        known = [*CONTENTS, README]  # what else is there, such as a target's shards, is not fetched
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=known))
    except HFValidationError:
        raise UserError(f"{path}: no such folder, and not a Hub id (user/name) either") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(f"{path}: no such folder, and not to be had from the Hub ({brief(error)})") from None


def drafter_hash(folder: Path) -> str:
    """Hash of a bundle's drafter, whatever else has been put beside it.

    Raises:
        UserError: a file cannot be read.
    """
    return fingerprint([content_hash(folder / name) for name in ("config.json", WEIGHTS)])


def load_bundle(
    path: str | os.PathLike,
    target: FrozenTarget | str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    calibration: Calibration | str | os.PathLike | None = None,
    own_calibration: bool = True,
    classifier: str | os.PathLike | None = None,
    ngrams: str | os.PathLike | None = None,
) -> Bundle:
    """Loads a bundle (or the bare folder of a trained drafter) with its target, for decoding.

    Args:
        path: folder or Hub id.
        target: a loaded target, or what `load_target` takes. None: what the bundle was made for.
        dtype: of a target that is loaded here, as `load_target` takes it; the drafter takes the target's.
        calibration: it, its file or its folder, used wherever it was made. None for the bundle's own, if it
            has one.
        own_calibration: whether to read the bundle's own; it may be what is to be replaced.
        classifier: folder of another classifier than the bundle's own, which it may lack.
        ngrams: folder of another n-gram cache than the bundle's own, or of other settings of Self-Draft.

    Raises:
        UserError: no bundle, damaged, or made for another target.
    """
    folder = find_bundle(path)
    config = read_config(folder)
    if not isinstance(target, FrozenTarget):
        made_for = config["target"].get("name")
        if target is None and made_for is None:
            raise UserError(f"{folder}: config.json names no target; pass one")
        try:
            target = load_for_decoding(target or made_for, dtype=dtype, device=device)
        except UserError as error:
            if target is not None or str(error).startswith("dtype:"):
                raise
            raise UserError(
                f"{folder}: its target cannot be loaded; name one with `target` (--target on the command "
                f"line). {error}"
            ) from None
    drafter = load_drafter(folder, target, dtype=target.dtype)
    fingerprints = {"target": target.fingerprint, "drafter": weights_hash(drafter)[:16]}
    drafter.pack()
    is_given = calibration is not None
    results = read_evaluation(folder / EVALUATION) or {}
    tree = results.get("tree")
    if "draft_length" in results:  # of format 1, which knew chains only
        tree = f"chain:length={results['draft_length']}"
    if calibration is None and own_calibration and (folder / CALIBRATION).exists():
        calibration = folder
    if calibration is not None and not isinstance(calibration, Calibration):
        calibration = Calibration.load(calibration)
    if classifier is None and (folder / CLASSIFIER).exists():
        classifier = folder
    found = None if classifier is None else Classifier.load(classifier).to(target.device)
    if ngrams is None and holds_self_draft(folder):
        ngrams = folder
    self_draft = None if ngrams is None else load_self_draft(target, ngrams)
    made = target, drafter, tree or DEFAULT_TREE, calibration, fingerprints, found, self_draft
    return Bundle(*made, str(path), is_given)
