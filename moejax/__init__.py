"""moejax: the Kimi K3 class of model in JAX: KDA, gated MLA, depth attention, LatentMoE with quantile balancing."""

from . import presets
from .config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from .modules.model import HybridLM

__version__ = "0.1.0"

__all__ = ["HybridLM", "KDAConfig", "MLAConfig", "MoEConfig", "ModelConfig", "__version__", "presets"]
