"""moejax: the Kimi K3 class of model in JAX: KDA, gated MLA, depth attention, LatentMoE with quantile balancing."""

import importlib
from typing import TYPE_CHECKING

from .config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from .modules.model import HybridLM

if TYPE_CHECKING:
    from . import presets

__version__ = "0.1.0"

__all__ = ["HybridLM", "KDAConfig", "MLAConfig", "MoEConfig", "ModelConfig", "__version__", "presets"]


def __getattr__(name: str):
    if name == "presets":  # on demand, so that `python -m moejax.presets` runs it once
        return importlib.import_module(".presets", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
