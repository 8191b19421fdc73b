"""Tasks by the names that recipes use."""

from drafttrain.reasoning.tasks.blocksworld import Blocksworld
from drafttrain.reasoning.tasks.gsm8k import Gsm8k
from drafttrain.reasoning.tasks.task import Task
from drafttrain.reasoning.tasks.writing import Writing

TASKS: dict[str, type[Task]] = {task.name: task for task in (Gsm8k, Writing, Blocksworld)}
