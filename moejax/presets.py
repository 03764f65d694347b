"""Named model sizes. `python -m moejax.presets` prints them with their parameter counts."""

from __future__ import annotations

from .config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from .counting import count_parameters


def _tiny() -> ModelConfig:
    """The main job's model: every part of K3, minutes on two CPU cores."""
    return ModelConfig(
        vocab_size=320,
        hidden=128,
        layers=8,
        dense_width=384,
        residual_block=4,
        remat="none",
        kda=KDAConfig(heads=4, key_dim=32, value_dim=32),
        mla=MLAConfig(heads=4, nope_dim=32, rope_dim=16, value_dim=32, q_latent=96, kv_latent=64),
        moe=MoEConfig(experts=32, experts_per_token=4, expert_width=64, latent=64, shared_width=128),
    )


def _small() -> ModelConfig:
    """100M active parameters; heads and experts divide by expert parallelism 16 and tensor parallelism 4."""
    return ModelConfig(
        vocab_size=32768,
        hidden=512,
        layers=16,
        dense_width=2048,
        residual_block=4,
        kda=KDAConfig(heads=8, key_dim=64, value_dim=64),
        mla=MLAConfig(heads=8, nope_dim=64, rope_dim=32, value_dim=64, q_latent=256, kv_latent=256),
        moe=MoEConfig(experts=64, experts_per_token=8, expert_width=384, latent=256, shared_width=768),
    )


def _kimi_linear_48b() -> ModelConfig:
    """moonshotai/Kimi-Linear-48B-A3B (arXiv 2510.26692)."""
    return ModelConfig(
        vocab_size=163840,
        hidden=2304,
        layers=27,
        pattern="KKKM" * 6 + "KKM",
        dense_width=9216,
        residual="plain",
        activation="swiglu",
        kda=KDAConfig(heads=32, key_dim=128, value_dim=128, output_gate_rank=128, lower_bound=None),
        mla=MLAConfig(heads=32, nope_dim=128, rope_dim=64, value_dim=128, kv_latent=512, gate=False),
        moe=MoEConfig(
            experts=256, experts_per_token=8, expert_width=1024, shared_width=1024, scaling=2.446, balance="sign"
        ),
    )


def _kimi_k3() -> ModelConfig:
    """The text model of moonshotai/Kimi-K3 (arXiv 2607.24653)."""
    return ModelConfig(
        vocab_size=163840,
        hidden=7168,
        layers=93,
        pattern="KKKM" * 23 + "M",
        dense_width=33792,
        residual_block=12,
        kda=KDAConfig(heads=96, key_dim=128, value_dim=128),
        mla=MLAConfig(heads=96, nope_dim=128, rope_dim=64, value_dim=128, q_latent=1536, kv_latent=512),
        moe=MoEConfig(experts=896, experts_per_token=16, expert_width=3072, latent=3584, shared_width=6144),
    )


_PRESETS = {"tiny": _tiny, "small": _small, "kimi_linear_48b": _kimi_linear_48b, "kimi_k3": _kimi_k3}
NAMES = tuple(_PRESETS)


def get(name: str) -> ModelConfig:
    """The configuration called `name`; ValueError names the known ones."""
    if name not in _PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(NAMES)}.")
    return _PRESETS[name]()


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f}"


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="moejax presets (parameters in millions)")
    columns = ("preset", "layers", "KDA:MLA", "hidden", "experts", "total", "active", "embedding", "experts' share")
    for column in columns:
        table.add_column(column, justify="left" if column == "preset" else "right")
    for name in NAMES:
        config = get(name)
        counts = count_parameters(config)
        mixers = f"{config.mixers.count('K')}:{config.mixers.count('M')}"
        routed = f"{config.moe.experts_per_token} of {config.moe.experts}"
        share = f"{counts.experts / counts.total:.1%}"
        row = (config.layers, mixers, config.hidden, routed, _millions(counts.total), _millions(counts.active))
        table.add_row(name, *map(str, row), _millions(counts.embedding), share)
    console = Console()
    if console.width < 116:  # a pipe, or a narrow window: wrapped figures cannot be read
        console = Console(width=116)
    console.print(table)
    console.print("active: what one token meets; the head is counted, the embedding table is not.")


if __name__ == "__main__":
    main()
