"""Attention of new tokens over a cache of latents: the absorbed form of multi-head latent attention."""

from .api import latent_decode

__all__ = ["latent_decode"]
