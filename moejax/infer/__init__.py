"""Inference: one HybridCache for all layers, prefill in chunks, decoding steps, sampling, generation."""

from .cache import CacheBytes, HybridCache, LatentCache, cache_bytes, check_cut, clear_rows, init_cache, new_cache, put_rows, take_rows
from .decode import decode_step
from .engine import Engine, QueueFull, Request, Ticket
from .generate import Generated, generate
from .prefill import Step, prefill, prefill_chunk
from .sampling import Drawn, Sampling, make_sampling, sample
from .weights import Weights, prepare

__all__ = [
    "CacheBytes",
    "Drawn",
    "Engine",
    "Generated",
    "HybridCache",
    "LatentCache",
    "QueueFull",
    "Request",
    "Sampling",
    "Step",
    "Ticket",
    "Weights",
    "cache_bytes",
    "check_cut",
    "clear_rows",
    "decode_step",
    "generate",
    "init_cache",
    "make_sampling",
    "new_cache",
    "prefill",
    "prefill_chunk",
    "prepare",
    "put_rows",
    "sample",
    "take_rows",
]
