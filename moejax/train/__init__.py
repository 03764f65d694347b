"""Training: state, steps, optimizers, curriculum, and what keeps a run alive."""

from .alarms import MonitorConfig, Monitors, Verdict
from .caretaker import Caretaker, SafetyConfig
from .checkpoint import Checkpointer
from .checkpoint_folder import DamagedCheckpointError
from .checkpoint_write import CheckpointError
from .curriculum import Curriculum, Stage
from .events import EventLog, read_events
from .flops import flops_per_token
from .goodput import Goodput
from .loop import LoopResult, StopRequest, run_loop, stop_on_signals
from .optimizers import OptimizerConfig, adamw, make_optimizer
from .probes import Probe
from .recovery import Recovery, roll_back
from .replay import ReplayMismatch, ReplayProbe
from .schedules import cosine_schedule, make_schedule, wsd_schedule
from .sinks import Sink, Sinks
from .snapshot import Snapshots
from .state import TrainState, init_state, make_state
from .step import make_eval_step, make_train_step
from .watchdog import Watchdog

__all__ = [
    "Caretaker",
    "CheckpointError",
    "Checkpointer",
    "Curriculum",
    "DamagedCheckpointError",
    "EventLog",
    "Goodput",
    "LoopResult",
    "MonitorConfig",
    "Monitors",
    "OptimizerConfig",
    "Probe",
    "Recovery",
    "ReplayMismatch",
    "ReplayProbe",
    "SafetyConfig",
    "Sink",
    "Sinks",
    "Snapshots",
    "Stage",
    "StopRequest",
    "TrainState",
    "Verdict",
    "Watchdog",
    "adamw",
    "cosine_schedule",
    "flops_per_token",
    "init_state",
    "make_eval_step",
    "make_optimizer",
    "make_schedule",
    "make_state",
    "make_train_step",
    "read_events",
    "roll_back",
    "run_loop",
    "stop_on_signals",
    "wsd_schedule",
]
