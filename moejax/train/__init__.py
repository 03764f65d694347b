"""Training: state, steps, optimizers, loss, balance."""

from .flops import flops_per_token
from .optimizers import OptimizerConfig, adamw, cosine_schedule
from .state import TrainState, init_state, make_state
from .step import make_eval_step, make_train_step

__all__ = [
    "OptimizerConfig",
    "TrainState",
    "adamw",
    "cosine_schedule",
    "flops_per_token",
    "init_state",
    "make_eval_step",
    "make_state",
    "make_train_step",
]
