"""Evaluations of long contexts: needles by depth and length, loss by position."""

from .needles import NeedleGrid, make_predict, needle_grid
from .position_loss import PositionLoss, bucket_name, document_rows, position_loss

__all__ = [
    "NeedleGrid",
    "PositionLoss",
    "bucket_name",
    "document_rows",
    "make_predict",
    "needle_grid",
    "position_loss",
]
