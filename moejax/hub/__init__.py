"""Published checkpoints (Hugging Face safetensors folders of Kimi K3 and Kimi-Linear) in and out. Never imports torch."""

from ..ops.mxfp4 import mxfp4_decode, mxfp4_encode, mxfp4_fake_quant
from .checkpoint import Checkpoint, Source
from .expected import PUBLISHED_VISION, inventory, vision_inventory
from .load import load
from .save import save
from .shards import TensorSpec

__all__ = [
    "PUBLISHED_VISION",
    "Checkpoint",
    "Source",
    "TensorSpec",
    "inventory",
    "load",
    "mxfp4_decode",
    "mxfp4_encode",
    "mxfp4_fake_quant",
    "save",
    "vision_inventory",
]
