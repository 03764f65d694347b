"""moejax: the Kimi K3 class of model in JAX."""

__version__ = "0.1.0"
