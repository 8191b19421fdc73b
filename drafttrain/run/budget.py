"""Plan how much of each stage fits into a time budget, from measured speeds; nothing is measured here.

    seconds of a stage = work / measured speed + loading the target + a fixed start

Every stage gets a fixed share of the time, regardless of what the others need, so a faster machine never
plans less of anything. A stage that does not fit its share is skipped and something bundled takes its place:
existing answers of the target instead of new ones, a trained drafter instead of a new one. If the share of
the evaluation is too small for a meaningful one, the evaluation gets all of the time.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.data.config import PromptSet, Source
from drafttrain.run.recipe import Recipe
from drafttrain.trees.costs import EXAMPLE_COSTS
from drafttrain.trees.parse import uses_calibration

UNLIMITED = 10**6  # rows of a source or prompt set without a limit
SPARE = 0.2  # share of the time left unplanned: other processes, speeds that were measured a little too high
SHARES = {
    "regenerate": 0.10,  # new answers are of the same model as the bundled ones: they add variety
    "train": 0.35,  # corpus, hidden states and training; the drafter it starts from is good already
    "calibrate": 0.10,  # the short one; decides between trees that are within a tenth of each other
    "evaluate": 0.45,  # the result: three decoders on every prompt, and the comparison in fp32
}
START_S = 5.0  # overhead of each stage: reading, tokenizing, checks, plots
LOADS = {"regenerate": 1, "train": 3, "calibrate": 2, "evaluate": 5}  # how often each loads a target or copy
LEAST_STEPS = 30  # fewer move a trained drafter by less than the noise of its measurement
LEAST_ANSWERS = 16
VALIDATION = 0.1  # share of the training's time
CALIBRATION_S = 10.0  # after which the parts of the short calibration start no more work
CALIBRATION_ROUNDS, CALIBRATION_TURNS = 3, 4  # minimum, or still running at that time
CALIBRATION_FORWARDS, CALIBRATION_TOKENS = 20, 169  # forwards in a round of timing, and their tokens
CALIBRATION_ANSWER = 32  # tokens
WARM_UP_TOKENS = 16
STOCK_PROMPT, STOCK_TOKENS = 16, 4  # of the first run in each dtype that is tried for transformers
STOCK_TRIALS, STOCK_S = 3, 10.0  # first runs, as the other dtype may take twice as long; later runs, seconds
# mean tokens of the bundled texts, chat template included
PROMPT = 105  # MT-bench, GSM8K and HumanEval
ASKED = 65  # data/train/conversations.jsonl, first turns
CONVERSATION = 181  # data/train/responses.jsonl.gz


@dataclass(frozen=True)
class Speeds:
    """Tokens per second of each kind of work, in the recipe's dtype.

    Attributes:
        load_seconds: seconds to load the target.
        generate: the target answering `generate_rows` prompts at once.
        generate_rows: the number of rows at which that was fastest.
        collect: the target over whole documents, states stored; prefill is about as fast.
        train: training on stored states.
        decode: the target alone, one sequence.
        transformers: `generate` of transformers, one sequence.
        draft: decoding with drafts, one sequence.
    """

    load_seconds: float
    generate: float
    generate_rows: int
    collect: float
    train: float
    decode: float
    transformers: float
    draft: float


@dataclass(frozen=True)
class Evaluation:
    """Size of an evaluation. If there are several trees, one is chosen on tuning prompts.

    Attributes:
        tasks: number of tasks; the first ones of the recipe are measured.
        prompts: prompts of each task.
        new_tokens: tokens decoded per prompt.
        trees: number of trees; the first usable ones of the recipe are tried.
        tune_prompts: prompts on which the tree is chosen.
        lossless_prompts: prompts compared in fp32.
        lossless_tokens: tokens decoded per prompt for that.
    """

    tasks: int
    prompts: int
    new_tokens: int
    trees: int
    tune_prompts: int
    lossless_prompts: int
    lossless_tokens: int

    def within(self, most: "Evaluation") -> "Evaluation":
        """Return the smaller of this size and `most`, field by field."""
        return Evaluation(*map(min, dataclasses.astuple(self), dataclasses.astuple(most)))

    @classmethod
    def of(cls, recipe: Recipe) -> "Evaluation":
        """Return the size that a recipe asks for."""
        config = recipe.evaluate
        return cls(
            tasks=len(config.prompts),
            prompts=max(map(limit_of, config.prompts)),
            new_tokens=config.max_new_tokens,
            trees=len(config.trees),
            tune_prompts=limit_of(config.tune_prompts),
            lossless_prompts=config.lossless_prompts,
            lossless_tokens=config.lossless_new_tokens,
        )


# each at least as large as the one above it in every respect
SIZES = [
    Evaluation(1, 1, 8, 1, 1, 0, 8),
    Evaluation(1, 1, 16, 1, 1, 1, 8),
    Evaluation(3, 1, 16, 1, 1, 1, 16),
    Evaluation(3, 1, 32, 1, 1, 3, 16),
    Evaluation(3, 2, 32, 2, 2, 3, 32),
    Evaluation(3, 3, 48, 2, 2, 4, 32),
    Evaluation(3, 4, 64, 3, 3, 6, 32),
    Evaluation(3, 5, 64, 4, 4, 6, 48),
    Evaluation(3, 6, 80, 4, 4, 8, 48),
    Evaluation(3, 6, 96, 4, 4, 8, 64),
    Evaluation(3, 8, 96, 4, 6, 12, 64),
    Evaluation(3, 10, 96, 4, 6, 12, 64),
    Evaluation(3, 12, 96, 4, 8, 16, 64),
    Evaluation(3, 16, 96, 4, 8, 16, 64),
    Evaluation(3, 20, 96, 4, 8, 16, 64),
]
DECENT = 5  # index of the smallest size for which other stages run as well: all tasks, some prompts each


@dataclass(frozen=True)
class Plan:
    """Amount of work planned for each stage.

    Attributes:
        answers: new answers of the target; 0: none are generated.
        conversations: conversations of the corpus, new answers included.
        steps: training steps; 0: the drafter that training would start from is used untrained.
        eval_prompts: prompts decoded to validate the trained drafter.
        calibrates: whether the short calibration runs.
        evaluation: size of the evaluation.
        seconds: estimated seconds by stage.
        fitting: the answers and steps that fit their shares, even if too few to be worth it; empty if the
            evaluation leaves no time for other stages.
    """

    answers: int
    conversations: int
    steps: int
    eval_prompts: int
    calibrates: bool
    evaluation: Evaluation
    seconds: dict[str, float]
    fitting: dict[str, int]

    @property
    def total(self) -> float:
        """Return the seconds of all stages."""
        return sum(self.seconds.values())


def rows_of(sources: Sequence[Source]) -> int:
    """Return the maximum number of rows of some sources."""
    limits = (source.max_conversations for source in sources)
    return sum(UNLIMITED if limit is None else limit for limit in limits)


def asked_rows(recipe: Recipe) -> int:
    """Return the maximum number of conversations that the target answers; 0 without a section regenerate."""
    return rows_of(recipe.regenerate.sources) if recipe.regenerate else 0


def limit_of(prompts: PromptSet) -> int:
    """Return the maximum number of prompts of a set."""
    return UNLIMITED if prompts.limit is None else prompts.limit


def plain_trees(trees: Sequence[str]) -> list[str]:
    """Return the trees that need no calibration."""
    return [tree for tree in trees if not uses_calibration(tree, EXAMPLE_COSTS)]


def plan(speeds: Speeds, seconds: float, recipe: Recipe) -> Plan:
    """Fit a recipe's stages into a time budget; a full calibration is replaced by the short one.

    Args:
        seconds: the budget, of which the share `SPARE` stays unplanned.
        recipe: upper limit of all that is planned.
    """
    most, n_plain = Evaluation.of(recipe), len(plain_trees(recipe.evaluate.trees))
    shares = {stage: share * seconds * (1 - SPARE) for stage, share in SHARES.items()}
    sizes = [size.within(most) for size in SIZES]
    if evaluate_seconds(speeds, sizes[DECENT]) > shares["evaluate"]:
        plain = [dataclasses.replace(size, trees=min(size.trees, n_plain)) for size in sizes]
        evaluation = _largest(speeds, plain[: DECENT + 1], sum(shares.values()))
        return Plan(0, 0, 0, 0, False, evaluation, {"evaluate": evaluate_seconds(speeds, evaluation)}, {})
    evaluation, calibrates = _largest(speeds, sizes, shares["evaluate"]), False
    if evaluation.trees > n_plain:
        calibrates = recipe.calibrate.is_asked and calibrate_seconds(speeds) <= shares["calibrate"]
        if not calibrates:
            evaluation = dataclasses.replace(evaluation, trees=n_plain)

    asked, bundled = asked_rows(recipe), rows_of(recipe.corpus.sources)
    answered = _answers(speeds, shares["regenerate"], recipe) if asked else 0
    possible = min(_conversations(speeds, shares["train"], recipe), bundled + answered)
    steps = _steps(possible, recipe)
    enough = min(LEAST_STEPS, _steps(bundled, recipe))
    eval_prompts = int(VALIDATION * shares["train"] / _validation_seconds(speeds, recipe))
    is_trained = steps >= max(enough, 1) and eval_prompts > 0
    answers = min(answered, possible // 2)
    is_answered = is_trained and answers >= min(LEAST_ANSWERS, max(asked, 1))
    found = Plan(
        answers=answers if is_answered else 0,
        conversations=possible if is_trained else 0,
        steps=steps if is_trained else 0,
        eval_prompts=min(eval_prompts, recipe.training.eval_prompt_limit) if is_trained else 0,
        calibrates=calibrates,
        evaluation=evaluation,
        seconds={},
        fitting={"answers": answers, "steps": steps},
    )
    return dataclasses.replace(found, seconds=stage_seconds(speeds, found, recipe))


def _largest(speeds: Speeds, sizes: list[Evaluation], seconds: float) -> Evaluation:
    """Return the largest evaluation that fits into the seconds; the smallest if none does."""
    return [size for size in sizes if size is sizes[0] or evaluate_seconds(speeds, size) <= seconds][-1]


def stage_seconds(speeds: Speeds, planned: Plan, recipe: Recipe) -> dict[str, float]:
    """Return the estimated seconds of each stage of a plan; skipped stages have no entry."""
    seconds = {}
    if planned.answers:
        seconds["regenerate"] = regenerate_seconds(speeds, planned.answers, recipe)
    if planned.steps:
        seconds["train"] = train_seconds(speeds, planned.conversations, planned.eval_prompts, recipe)
    if planned.calibrates:
        seconds["calibrate"] = calibrate_seconds(speeds)
    return seconds | {"evaluate": evaluate_seconds(speeds, planned.evaluation)}


def regenerate_seconds(speeds: Speeds, answers: int, recipe: Recipe) -> float:
    """Return the seconds of prefill and generation; a half-empty batch takes as long as a full one."""
    generated = max(answers, speeds.generate_rows) * recipe.regenerate.max_new_tokens
    start = _start(speeds, "regenerate")
    return start + answers * ASKED / speeds.collect + generated / speeds.generate


def train_seconds(speeds: Speeds, conversations: int, eval_prompts: int, recipe: Recipe) -> float:
    """Return the time of building the corpus, storing its states, training and the validation at the end."""
    tokens = conversations * CONVERSATION
    validating = eval_prompts * _validation_seconds(speeds, recipe)
    return _train_start(speeds, recipe) + tokens * _token_seconds(speeds, recipe) + validating


def calibrate_seconds(speeds: Speeds) -> float:
    """Return the seconds of the short calibration: its time limit and the work that may exceed it."""
    round_seconds = CALIBRATION_FORWARDS / speeds.decode + CALIBRATION_TOKENS / speeds.collect
    decoding = CALIBRATION_TURNS * _turn(speeds, speeds.draft, CALIBRATION_ANSWER)
    return _start(speeds, "calibrate") + CALIBRATION_S + CALIBRATION_ROUNDS * round_seconds + decoding


def evaluate_seconds(speeds: Speeds, size: Evaluation) -> float:
    """Return the time of choosing the tree, measuring every task with three decoders, and comparing outputs
    in fp32 (which is slower, but decodes eight prompts at once)."""
    warm_up = _three(speeds, min(WARM_UP_TOKENS, size.new_tokens))
    measuring = size.tasks * (warm_up + size.prompts * _three(speeds, size.new_tokens))
    tuning = 0.0
    if size.trees > 1:
        tuning = size.trees * (size.tune_prompts + 1) * _turn(speeds, speeds.draft, size.new_tokens)
    comparing = size.lossless_prompts * _three(speeds, size.lossless_tokens)
    choosing = STOCK_TRIALS * (STOCK_PROMPT / speeds.collect + STOCK_TOKENS / speeds.transformers) + STOCK_S
    return _start(speeds, "evaluate") + choosing + tuning + measuring + comparing


def _three(speeds: Speeds, tokens: int) -> float:
    """Return the seconds of decoding a prompt autoregressively, by transformers, and with drafts."""
    return sum(_turn(speeds, speed, tokens) for speed in (speeds.decode, speeds.transformers, speeds.draft))


def _turn(speeds: Speeds, speed: float, tokens: int) -> float:
    return PROMPT / speeds.collect + tokens / speed


def _start(speeds: Speeds, stage: str) -> float:
    return START_S + LOADS[stage] * speeds.load_seconds


def _train_start(speeds: Speeds, recipe: Recipe) -> float:
    """Return the time that does not grow with the corpus; the last row of held-out text is half full."""
    return 2 * START_S + _start(speeds, "train") + recipe.training.row_length / speeds.train


def _token_seconds(speeds: Speeds, recipe: Recipe) -> float:
    """Return the seconds per corpus token: its states, its part in the epochs and in the held-out text."""
    return 1 / speeds.collect + (recipe.training.epochs + recipe.corpus.validation_fraction) / speeds.train


def _validation_seconds(speeds: Speeds, recipe: Recipe) -> float:
    return PROMPT / speeds.collect + recipe.training.eval_new_tokens / speeds.generate


def _answers(speeds: Speeds, share: float, recipe: Recipe) -> int:
    """Return the maximum number of answers that fit into a share of the time."""
    room = share - _start(speeds, "regenerate")
    one = recipe.regenerate.max_new_tokens / speeds.generate  # seconds of an answer
    answers = int(room / (ASKED / speeds.collect + one))
    if answers < speeds.generate_rows:
        answers = int((room - speeds.generate_rows * one) * speeds.collect / ASKED)
    return min(max(answers, 0), asked_rows(recipe))


def _conversations(speeds: Speeds, share: float, recipe: Recipe) -> int:
    """Return the maximum number of conversations that can be stored and trained on in a share of the time."""
    room = (1 - VALIDATION) * share - _train_start(speeds, recipe)
    return max(0, int(room / _token_seconds(speeds, recipe) / CONVERSATION))


def _steps(conversations: int, recipe: Recipe) -> int:
    config = recipe.training
    tokens = conversations * CONVERSATION * (1 - recipe.corpus.validation_fraction) * config.epochs
    steps = int(tokens / (config.rows_per_batch * config.row_length * config.gradient_accumulation_steps))
    return steps if config.max_steps is None else min(steps, config.max_steps)
