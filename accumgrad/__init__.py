"""Gradient accumulation for TensorFlow 1 style graph-mode code."""

from accumgrad.requirements import check_tensorflow

check_tensorflow()

from accumgrad.builder import AccumulationOps  # noqa: E402
from accumgrad.builder import build_accumulation_ops  # noqa: E402
from accumgrad.describe import AccumulatorDescription  # noqa: E402
from accumgrad.describe import describe_accumulators  # noqa: E402
from accumgrad.optimizer import AccumulatingOptimizer  # noqa: E402
from accumgrad.session_loop import CycleResult  # noqa: E402
from accumgrad.session_loop import run_cycle  # noqa: E402
from accumgrad.session_loop import run_cycles  # noqa: E402
from accumgrad.transforms import clip_by_global_norm  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "AccumulatingOptimizer",
    "AccumulationOps",
    "AccumulatorDescription",
    "CycleResult",
    "build_accumulation_ops",
    "clip_by_global_norm",
    "describe_accumulators",
    "run_cycle",
    "run_cycles",
]
