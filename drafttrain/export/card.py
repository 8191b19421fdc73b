"""The model card of a bundle: what it is, how it was made, what it reaches, how to load it."""

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

if TYPE_CHECKING:
    from drafttrain.export.bundle import ExportConfig


def model_card(
    config: "ExportConfig",
    settings: dict[str, Any],
    evaluation: dict[str, Any] | None,
    log: list[dict[str, Any]],
    n_bytes: int,
) -> str:
    """Renders the card (Markdown with the Hub's metadata in front).

    Args:
        settings: the drafter's `config.json`.
        evaluation: its `eval.json`; without it the card says that nothing was measured.
        log: the trainer's log history.
        n_bytes: size of the bundle.
    """
    target, training = settings["target"], settings.get("training", {})
    name = config.name or f"{str(target['name']).rstrip('/').split('/')[-1]}-edd"
    base_model = config.base_model or target["name"]
    tasks = (evaluation or {}).get("tasks", {})
    data = ModelCardData(
        language=config.language,
        license=config.license,
        library_name="drafttrain",
        tags=["speculative-decoding", "edd", "drafter"],
        base_model=base_model,
        model_name=name,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=task,
                dataset_name=task,
                metric_type="accept_len",
                metric_value=round(row["accept_len"], 3),
            )
            for task, row in tasks.items()
        ]
        or None,
    )
    return ModelCard.from_template(
        data,
        template_str=(files("drafttrain.export") / "card.md").read_text(encoding="utf-8"),
        name=name,
        base_model=base_model,
        target=target,
        settings=settings,
        training=training,
        held_out=[entry for entry in log if "eval_loss" in entry],
        evaluation=evaluation,
        tasks=tasks,
        datasets=config.datasets or [],
        command=config.command,
        megabytes=round(n_bytes / 1e6, 1),
    ).content
