"""Grouped matrix product: every row times the matrix of its group."""

from .api import grouped_matmul

__all__ = ["grouped_matmul"]
