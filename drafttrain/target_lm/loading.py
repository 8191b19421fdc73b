"""Load a target and its tokenizer from a folder, a .gguf file or the Hub, with errors of one line."""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from drafttrain.kernels.dtype import Work, resolve_dtype
from drafttrain.target_lm.known import SMOLLM2, is_known, read_record
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.native import can_run_natively
from drafttrain.target_lm.sizes import require_values
from drafttrain.utils.errors import UserError, first_line
from drafttrain.utils.threads import limit_threads

CPU = torch.device("cpu")
MERGE = "merge the adapter into its model first (merge_and_unload of peft, then save_pretrained)"
STORED = "stored"  # the dtype of the checkpoint, for callers that copy weights instead of computing with them


def load_target(
    model: str, dtype: str | torch.dtype = "auto", device: str = "auto", work: Work = "products"
) -> FrozenTarget:
    """Load a frozen target with its tokenizer, and limit torch's threads to the cores that this process may
    use (`threads.py`).

    Args:
        model: a name that `fetch_target` knows, a local folder, a `.gguf` file (converted once, then
            taken from the cache) or a Hugging Face Hub id.
        dtype: of the weights: "auto" for the one in which this machine does `work` fastest; "bfloat16" or
            "float32", with a warning if it is much slower; a torch dtype, without a warning; or "stored".
        device: "auto" is this process's GPU if there is one, else the CPU.
        work: the work that "auto" optimizes: "products" of many rows (training, collecting) or "decoding".

    Raises:
        UserError: nothing to load under that name, no network, not a causal LM, missing or unreadable
            weights, a tokenizer that does not fit, or no such device or dtype.
    """
    limit_threads()
    place = resolve_target(model)
    tokenizer = load_tokenizer(place)
    if isinstance(dtype, str) and dtype != STORED:
        dtype = dtype_for(load_config(place), dtype, _device(device), work)
    language_model = load_model(place, dtype).to(_device(device))
    rows = language_model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise UserError(
            f"{model}: its tokenizer has {len(tokenizer)} tokens but the model {rows} embedding rows; "
            "put the model's own tokenizer files into the folder"
        )
    name = (read_record(place) or {}).get("name")
    return FrozenTarget(language_model, tokenizer, name or model)


def choose_dtype(model: str, dtype: str, device: str = "auto", work: Work = "products") -> torch.dtype:
    """Return the dtype that a name means on this machine for this target.

    Args:
        model, dtype, device, work: as `load_target`.

    Raises:
        UserError: no such dtype, device or target.
    """
    return dtype_for(load_config(resolve_target(model)), dtype, _device(device), work)


def dtype_for(config: PreTrainedConfig, dtype: str, device: torch.device, work: Work) -> torch.dtype:
    """Return the dtype as `choose_dtype` does, given a target's config."""
    text = config.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    inner = max(inner) if isinstance(inner, list) else inner  # of each block
    return resolve_dtype(dtype, work, device, text.hidden_size, inner)


def load_for_decoding(model: str, dtype: str | torch.dtype = "auto", device: str = "auto") -> FrozenTarget:
    """Load a target, check that it verifies trees correctly, and lay out its weights for decoding.

    Raises:
        UserError: as `load_target`, or it does not verify trees correctly.
    """
    target = load_target(model, dtype=dtype, device=device, work="decoding")
    knows = can_run_natively(target.base, target.config)
    if not knows:
        _check_trees(target)
    target.pack()  # compares a native forward with the stock one
    if knows and target.native is None:  # they differ, and the stock one is used
        _check_trees(target)
    return target


def _check_trees(target: FrozenTarget) -> None:
    from drafttrain.target_lm.tree_check import check_tree_support  # for targets without a native forward

    check_tree_support(target)


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load a target's tokenizer, given a name as `load_target` takes it.

    Raises:
        UserError: no tokenizer there, an unreadable one, or one without an end-of-sequence token.
    """
    place = resolve_target(model)
    with _one_line_errors(place, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        tokenizer("a")  # settings of wrong types fail only now
    if tokenizer.eos_token_id is None:
        raise UserError(f"{model}: its tokenizer has no EOS token; set eos_token in tokenizer_config.json")
    return tokenizer


def resolve_target(model: str) -> str:
    """Return the folder of a target, which is fetched or converted first if need be; a Hub id unchanged.

    Raises:
        UserError: a path that does not exist, a folder without `config.json`, or a misspelt known name.
    """
    path = Path(os.path.expanduser(model))
    if is_known(model) or path.suffix.lower() == ".gguf":
        from drafttrain.target_lm.fetch import fetch_target  # for targets that are not a folder yet

        return str(fetch_target(model))
    if path.is_dir():
        if not (path / "config.json").is_file():
            has_adapter = (path / "adapter_config.json").is_file()
            remedy = MERGE if has_adapter else "name a folder that save_pretrained wrote"
            raise UserError(f"{path}: no config.json in it; {remedy}")
        return str(path)
    if path.exists():
        raise UserError(
            f"{path}: must be a folder or end in .gguf, got another file; link a GGUF file as NAME.gguf"
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError(f"{model}: no such folder")
    if "/" not in model and difflib.get_close_matches(model.lower(), [SMOLLM2], cutoff=0.8):
        raise UserError(f"{model}: no such target; did you mean {SMOLLM2}?")
    return model


def load_config(place: str) -> PreTrainedConfig:
    """Return the config of a folder or Hub id; no code that comes with it is run.

    Raises:
        UserError: it cannot be read, or is not that of a causal LM with possible sizes.
    """
    with _one_line_errors(place, "config"):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    _require_causal_lm(place, config)
    require_values(place, config.get_text_config())
    return config


def load_model(place: str, dtype: str | torch.dtype) -> PreTrainedModel:
    """Load the causal LM in a folder; arguments and errors as `load_target`, without "auto"."""
    config = load_config(place)
    safe = True
    if not any(Path(place).glob("*.safetensors")):
        from drafttrain.target_lm.pickles import are_allowed

        safe = not are_allowed(place)
    wanted = "auto" if dtype == STORED else dtype  # as transformers calls it
    with _one_line_errors(place, "weights"):
        model, info = AutoModelForCausalLM.from_pretrained(
            place,
            config=config,
            dtype=wanted,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=safe or None,
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(f"{place}: must be a model without adapters, got adapter_config.json; {MERGE}")
    if missing := sorted(info["missing_keys"]):  # transformers would go on with random numbers in their place
        raise UserError(
            f"{place}: no weights for {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}; "
            "the checkpoint is incomplete or of another architecture than its config.json says"
        )
    if mismatched := sorted(info["mismatched_keys"]):  # likewise here, as `ignore_mismatched_sizes` is set
        name, stored, wanted = mismatched[0]
        raise UserError(
            f"{place}: {name} is stored as {list(stored)} and config.json wants {list(wanted)}; "
            "put the files of one model into the folder"
        )
    return model


def _require_causal_lm(place: str, config: PreTrainedConfig) -> None:
    """Refuse encoders such as BERT, whose weights would load into a causal class without an error."""
    stored = [str(name) for name in config.architectures] if isinstance(config.architectures, list) else []
    if config.is_encoder_decoder or (stored and not any(_is_causal(name) for name in stored)):
        what = ", ".join(stored) or config.model_type
        raise UserError(f"{place}: must be a causal language model (…ForCausalLM), got {what}")


def _is_causal(class_name: str) -> bool:
    return class_name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


def _device(device: str) -> torch.device:
    if device in ("auto", "cuda") and torch.cuda.is_available():  # each process of a launch has its own
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0))
    if device == "auto":
        return CPU
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # unknown name; no such accelerator here
        raise UserError(f"device: {device!r} cannot be used ({first_line(error)}); try auto") from error


@contextmanager
def _one_line_errors(model: str, part: str) -> Iterator[None]:
    """Turn the exceptions that transformers raises for bad folders, files and names into one line."""
    try:
        yield
    except Exception as error:  # transformers, tokenizers, safetensors and torch raise all kinds
        if not Path(model).is_dir():
            remedy = "check the name and the network"
        elif part == "tokenizer" and not (Path(model) / "tokenizer.json").is_file():
            remedy = "put the model's own tokenizer.json and tokenizer_config.json into the folder"
        else:
            remedy = "check the files in the folder"
        raise UserError(f"{model}: cannot load its {part} ({first_line(error)}); {remedy}") from error
