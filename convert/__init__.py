"""Drafter checkpoints from torch to MLX and back; `import` loads no backend."""

from .check import CheckReport, check
from .folders import Report, to_mlx, to_torch

__all__ = ["CheckReport", "Report", "check", "to_mlx", "to_torch"]
