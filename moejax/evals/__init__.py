"""Evaluations of long contexts: needles by depth and length, loss by position."""

from .needles import NeedleGrid, make_predict, needle_grid
from .position_loss import PositionLoss, bucket_name, document_rows, position_loss
from .ruler import RulerTable, ruler, score
from .synthetic import TaskScore, answer_accuracy, task_predict
from .texts import text_generator

__all__ = [
    "NeedleGrid",
    "PositionLoss",
    "RulerTable",
    "TaskScore",
    "answer_accuracy",
    "bucket_name",
    "document_rows",
    "make_predict",
    "needle_grid",
    "position_loss",
    "ruler",
    "score",
    "task_predict",
    "text_generator",
]
