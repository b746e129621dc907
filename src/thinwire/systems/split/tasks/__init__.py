"""Data to fine-tune on: GLUE's files, lines of the standard library, tokenisers, metrics.

Not here: models and training.
"""

from thinwire.systems.split.tasks.base import Task, TextData
from thinwire.systems.split.tasks.glue import COLUMNS, glue_task
from thinwire.systems.split.tasks.stdlib import stdlib_task
from thinwire.systems.split.tasks.tokens import local_tokenizer, trained_tokenizer

__all__ = ["COLUMNS", "Task", "TextData", "glue_task", "local_tokenizer", "stdlib_task", "trained_tokenizer"]
