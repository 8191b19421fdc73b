"""Plan a run and print it as a table, for `drafttrain run --dry-run`."""

from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.table import Table

from drafttrain.run.workflow import Decision, Workflow


def plan(
    workflow: Workflow, first: str | None = None, last: str | None = None, only: str | None = None
) -> list[Decision]:
    """Return what `Workflow.run` would do with these stages, without changing anything."""
    decisions, remade = [], set()
    for stage in workflow.select(first, last, only):
        decision = workflow.decide(stage, remade)
        decisions.append(decision)
        if decision.action in ("run", "resume", "share"):
            remade.add(stage.name)
    return decisions


def print_plan(
    workflow: Workflow, decisions: Sequence[Decision], estimate: Callable[..., dict[str, str]]
) -> None:
    """Print a plan as a table.

    Args:
        estimate: `estimate(stage, recipe, folders)` gives what the stage of that name will take.
    """
    table = Table(title=escape(f"{workflow.output}: what would run"), title_justify="left")
    for heading in ("stage", "action", "why", "estimate"):
        table.add_column(heading, overflow="fold")
    for decision in decisions:
        stage, lines = decision.stage, {}
        if decision.action in ("run", "resume"):
            lines = estimate(stage.name, workflow.recipe, workflow.folders(stage))
        text = "\n".join(f"{key}: {value}" for key, value in lines.items())
        table.add_row(stage.name, decision.action, escape(decision.why), escape(text))
    workflow.console.print(table)
