"""Which implementation of an operation runs, and the switch between its kernels and plain XLA where a call is lowered.

An operation names itself (`what`), says why its kernels do not take a call (`refused`, None when they do) and gives two functions of
the same operands with the same results: `kernels` for NVIDIA GPUs and `plain` for every platform. Operands may be None.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
from jax import lax

from ..varying import match_varying
from . import triton_launch

PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")


def checked_platform(platform: str | None) -> str:
    """`platform`, or the default backend for None. Raises ValueError for an unknown one."""
    platform = jax.default_backend() if platform is None else platform
    if platform not in PLATFORMS:
        raise ValueError(f"platform={platform!r}; known platforms: {', '.join(PLATFORMS)}.")
    return platform


def implementation_on(platform: str | None, what: str, name: str | None, refused: str | None, *, plain=("xla",), absent=()) -> str:
    """The implementation that `name` gives on `platform` (None: the default backend), one of `plain` or "triton".

    name None is "triton" where the kernels can run, else "xla". absent: names that are known and not there yet.
    Raises ValueError for an unknown name and NotImplementedError, with the reason, for one that cannot run.
    """
    platform = checked_platform(platform)
    if name is not None and name in plain:
        return name
    reason = None if platform in ("cuda", "gpu") else f"its kernels run on NVIDIA GPUs, this is {platform!r}"
    reason = reason or refused or triton_launch.available()
    if name is None:
        return "xla" if reason else "triton"
    known = (*plain, "triton", *absent)
    if name not in known:
        raise ValueError(f"implementation={name!r}; known: {', '.join(known)}, or None to choose.")
    if name in absent:
        reason = "it is not part of this version"
    if reason:
        raise NotImplementedError(
            f"implementation={name!r} of {what} cannot run: {reason}; use implementation='xla' (or None), which runs on every platform."
        )
    return name


def choose(what: str, name: str | None, refused: str | None, *, loss: str, plain=("xla",), absent=()) -> str:
    """Which to run: one of `plain`, "triton", or "lowered": triton when lowered for cuda and xla otherwise.

    loss: how much slower XLA is, for the warning on a GPU whose kernels cannot be used.
    """
    if name is not None:
        return implementation_on(None, what, name, refused, plain=plain, absent=absent)
    if refused:
        return "xla"
    if (reason := triton_launch.available()) is None:
        return "lowered"
    if jax.default_backend() == "gpu":
        _warn_once(what, loss, reason)
    return "xla"


@functools.cache
def _warn_once(what: str, loss: str, reason: str) -> None:
    warnings.warn(f"{what} runs as plain XLA, {loss} than its kernels: {reason}.", RuntimeWarning, stacklevel=5)


def run(name: str, kernels, plain, operands):
    """kernels(*operands) or plain(*operands), by the platform that is lowered for when name is "lowered".

    Differentiated, each keeps what it keeps. A scan also stacks, as zeros, what the other one would have kept, in the text that is
    lowered: nobody reads it, and XLA removes it (the temporary memory of four KDA layers compiled for an H200 is the same without).
    """
    if name == "triton":
        return kernels(*operands)
    if name != "lowered":
        return plain(*operands)
    return _by_platform(kernels, plain, operands)


def run_keeping_inputs(name: str, kernels, plain, operands):
    """`run` for an operation that is cheap to do again: of a lowered choice the backward pass keeps the operands and nothing else.

    The kernels keep nothing else anyway. Without this a scan over layers that is lowered for cuda has zeros in the place of XLA's
    float32 sums, 4.8 GB a convolution at T=8192, C=36864, until XLA's simplifier removes them. Not for forward-mode differentiation.
    """
    if name != "lowered":
        return run(name, kernels, plain, operands)

    @jax.custom_vjp
    def chosen(*operands):
        return _by_platform(kernels, plain, operands)

    def gradients(function):
        def back(operands, cotangents):
            found = jax.vjp(function, *operands)[1](cotangents)
            floats = [x is not None and jnp.issubdtype(x.dtype, jnp.inexact) for x in operands]
            return tuple(g if is_float else None for g, is_float in zip(found, floats, strict=True))

        return back

    chosen.defvjp(
        lambda *operands: (chosen(*operands), operands),
        lambda operands, cotangents: _by_platform(gradients(kernels), gradients(plain), (operands, cotangents)),
    )
    # Cotangents must vary over the mesh axes of their operands, and they vary over those of all of them.
    leaves = jax.tree.leaves(operands)
    return chosen(*jax.tree.map(lambda x: match_varying(x, *leaves), operands))


def run_differentiating_plain(name: str, what: str, kernels, plain, operands):
    """`run` for kernels without a gradient: a lowered choice is differentiated through `plain`, on cuda too."""

    @jax.custom_jvp
    def chosen(*operands):
        return run(name, kernels, plain, operands)

    @chosen.defjvp
    def tangents(primals, tangents):
        if name == "triton":
            raise NotImplementedError(
                f"implementation='triton' of {what} has no gradient; use implementation='xla', or None, which differentiates through XLA."
            )
        return jax.jvp(plain, primals, tangents)

    leaves = jax.tree.leaves(operands)
    return chosen(*jax.tree.map(lambda x: match_varying(x, *leaves), operands))


def _by_platform(kernels, plain, operands):
    leaves = jax.tree.leaves(operands)
    alike = lambda run: lambda *operands: jax.tree.map(lambda x: match_varying(x, *leaves), run(*operands))
    return lax.platform_dependent(*operands, cuda=alike(kernels), default=alike(plain))
