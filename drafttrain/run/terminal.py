"""`drafttrain generate`: stream the text, then print accept_len, tokens/s and speedup in one line."""

import itertools
import warnings
from collections.abc import Sequence

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from drafttrain.decoder import GREEDY, Result, SpeculativeDecoder
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.stats import DecodeStats

STYLES = [Style(color=name) for name in ("cyan", "yellow", "green", "magenta", "blue")]
WARM_UP_TOKENS = 8  # decoded before timing: the first forwards of a process are slow


def generate(
    bundle: str | None,
    prompt: str,
    target: str | None = None,
    max_new_tokens: int = 128,
    tree: str | None = None,
    calibration: str | None = None,
    dtype: str = "auto",
    color: bool = True,
    compare: bool = True,
    sampling: SamplingParams = GREEDY,
    stop: Sequence[str] = (),
    ngrams: str | None = None,
    console: Console | None = None,
) -> None:
    """Stream the answer to a prompt, the tokens of each target forward in one color, and print figures.

    Args:
        bundle: folder or Hub id. None: the target drafts for itself (Self-Draft).
        target: None: the one the bundle names.
        tree: how drafts grow. None: what the bundle recommends.
        calibration: for `pct`, `timed` and `c2t`. None: the bundle's own.
        ngrams: folder of an n-gram cache. None: the bundle's own.
        compare: decode once more without drafts, for the speedup.
        sampling: how tokens are drawn.
        stop: strings that end the text.

    Raises:
        UserError: no such bundle, or it does not fit the target; an empty or too long prompt.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        if bundle is None:
            decoder = SpeculativeDecoder.self_draft(target, ngrams, dtype=dtype)
        else:
            decoder = SpeculativeDecoder.from_pretrained(
                bundle, target, dtype=dtype, tree=tree, calibration=calibration, ngrams=ngrams
            )
    console = console or Console(no_color=None if color else True, highlight=False)
    for warning in caught:
        _warn(console, str(warning.message))
    decoder.generate(prompt, min(WARM_UP_TOKENS, max_new_tokens))
    stats, token_ids = DecodeStats(), []
    colors = ColorSystem.STANDARD if console.color_system and not console.no_color else None
    pieces = decoder.stream(prompt, max_new_tokens, stats, sampling, stop)
    for piece, style in zip(pieces, itertools.cycle(STYLES)):
        console.file.write(style.render(piece.text, color_system=colors))  # `print` would wrap, expand tabs
        console.file.flush()
        token_ids += piece.token_ids
    console.print("\n")
    plain = decoder.autoregressive(prompt, max_new_tokens, sampling, stop) if compare else None
    console.print(figures(stats, token_ids, plain, decoder.proposer.draws), soft_wrap=True)


def _warn(console: Console, warning: str) -> None:
    console.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)  # it may name paths


def figures(stats: DecodeStats, token_ids: list[int], plain: Result | None, draws: bool = False) -> str:
    """Return accept_len and tokens/s, with an autoregressive run also speedup and whether outputs agree.

    Args:
        draws: candidates were drawn: a text with the same seed is another one of the same distribution.
    """
    line = f"accept_len {stats.accept_len:.2f}, {stats.tokens_per_second:.1f} tokens/s"
    if plain is None:
        return line
    # ratio of tokens/s, not of total times: in bf16 a near-tie may end one of the texts earlier
    slow = plain.stats.tokens_per_second
    speedup = stats.tokens_per_second / slow
    line += f", speedup {speedup:.2f} against autoregressive decoding ({slow:.1f} tokens/s)"
    if plain.token_ids == token_ids:
        return line + ", same output"
    if draws:
        return line + ", another text of the same distribution, as with all drawn trees"
    pairs = enumerate(zip(plain.token_ids, token_ids))
    first = next((i for i, (a, b) in pairs if a != b), min(len(plain.token_ids), len(token_ids)))
    return line + f", output differs from token {first + 1} on (a near-tie in bf16; try --dtype float32)"
