"""What a model needs on a mesh: memory, FLOPs and traffic by formula, and the same read from a compiled program."""

from ..shapes import Parameter, parameters
from .checks import divisibility
from .flops import PartFlops, part_flops
from .hlo_traffic import Collective, bytes_by_axis, read_collectives
from .memory import Memory, memory
from .planner import Plan, plan
from .topology import Topology
from .traffic import Step, Transfer, by_axes, traffic

__all__ = [
    "Collective",
    "Memory",
    "Parameter",
    "PartFlops",
    "Plan",
    "Step",
    "Topology",
    "Transfer",
    "by_axes",
    "bytes_by_axis",
    "divisibility",
    "memory",
    "parameters",
    "part_flops",
    "plan",
    "read_collectives",
    "traffic",
]
