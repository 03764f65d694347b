"""Launching Triton and Gluon kernels from JAX: is the software there, and one call around `jax_triton.triton_call`.

Nothing of Triton is imported before the first launch: `import moejax` works, and costs the same, without it.

Four faults of jax-triton 0.4.1 are corrected when it is first used; each correction does nothing on a version without the fault:
* It sends Gluon kernels through the passes of plain Triton (make_ttir, make_ttgir), which choose layouts anew: other code than
  Triton's own, slower, and for some kernels a crash of the compiler. Triton's pipeline for Gluon, gluon_to_ttgir, is used instead.
* It launches as many threads as `num_warps` says. `warp_specialize` adds warps of its own (Triton writes the total to the PTX as
  .reqntid), and the launch then fails with CUDA_ERROR_INVALID_VALUE. The number in the PTX is used instead.
* It demands the key "is_im2col" in the metadata of every host TMA descriptor. Triton 3.7.1 writes that key for `triton.jit`, not
  for Gluon. False is the default it reads itself where the key may be absent.
* Its rule for dead code has the arguments of JAX 0.11 (used outputs, equation); JAX 0.12 puts the inputs that live in between.
"""

import functools
import importlib
import importlib.metadata
import re
import sys
import warnings
from typing import Any

import jax

from ..varying import match_varying

JAX_TRITON, TRITON = (0, 4, 1), (3, 7, 1)
# From here on: the kernels were checked on a card with 3.7.1 alone, and compilers have broken such kernels; and what is corrected below is
# private to jax-triton.
UNTRIED = {"triton": (3, 8, 0), "jax-triton": (0, 5, 0)}
# Triton from 3.4.0 up to 3.7.1 gives wrong gradients for KDA kernels on Hopper (flash-linear-attention issues 640 and 983).
MISCOMPILES = (((3, 4, 0), (3, 7, 1)),)
HOPPER = 90  # wgmma exists on this compute capability alone

_ours: set[int] = set()  # kernels launched by `call`, by id: those that must not ask for global scratch


def available() -> str | None:
    """None when Triton kernels can be compiled and launched by this process, else the reason why not, for a message."""
    return _software() or _device()


@functools.cache
def _software() -> str | None:
    if sys.version_info < (3, 12):
        return f"jax-triton needs Python 3.12, this is {sys.version_info.major}.{sys.version_info.minor}"
    found = _version("triton")
    for low, high in MISCOMPILES:
        if found is not None and low <= found < high:
            return f"triton {_dots(found)} is known to miscompile these kernels on Hopper; install triton>={_dots(high)}"
    for package, wanted in (("jax-triton", JAX_TRITON), ("triton", TRITON)):
        found, untried = _version(package), UNTRIED[package]
        if found is None or found < wanted:
            have = "is not installed" if found is None else f"has version {_dots(found)}"
            return f"{package} {have}; install {package}>={_dots(wanted)} (pip install 'moejax[triton]')"
        if found >= untried:
            return f"{package} {_dots(found)} was never checked with these kernels; install {package}>={_dots(wanted)},<{_dots(untried)}"
    return None


@functools.cache
def _device() -> str | None:
    """A process without a GPU may still lower for one; a GPU that is not a Hopper can never run the kernels."""
    found = _capability()
    if found is None or found == HOPPER:
        return None
    return f"the kernels need a GPU of compute capability 9.0 (H100, H200), this one has {found // 10}.{found % 10}"


@functools.cache
def _capability() -> int | None:
    """Of this process's first GPU; None where there is none, or no CUDA plugin of JAX."""
    try:
        from jaxlib import gpu_triton

        return gpu_triton.get_compute_capability(0)
    except (ImportError, AttributeError, RuntimeError):  # no plugin; a plugin without a driver or a device
        return None


def _version(package: str) -> tuple[int, ...] | None:
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(x) for x in [*re.findall(r"\d+", text), "0", "0"][:3])


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@functools.cache
def _jax_triton() -> Any:
    """The module, corrected. Raises NotImplementedError with the reason where it cannot be used."""
    if (reason := available()) is not None:
        raise NotImplementedError(reason)
    library = importlib.import_module("jax_triton.triton_lib")
    _correct(library)
    return library


def _correct(library: Any) -> None:
    check, compile_kernel = library.CompilationResult.__post_init__, library.TritonFunction._compile_kernel

    def with_default_keys(result):
        for meta in result.tensordesc_meta or ():
            meta.setdefault("is_im2col", False)
        check(result)

    class GluonBackend(library.cb.CUDABackend):
        @staticmethod
        def make_ttir(module, *_):
            return module

        def make_ttgir(self, module, *args):
            return self.gluon_to_ttgir(module, *args)

    def corrected(self, spec, gpu_target, backend, backend_options):
        if gpu_target.backend == "cuda" and isinstance(self.fn, library.gl_runtime.GluonJITFunction):
            backend = GluonBackend(gpu_target)
        kernel, ttir, options, result = compile_kernel(self, spec, gpu_target, backend, backend_options)
        if result.global_scratch_size and id(self.fn) in _ours:
            # XLA cannot put such a kernel into a command buffer together with others (CUDA_ERROR_NOT_SUPPORTED at run time).
            raise RuntimeError(f"{self.name} needs {result.global_scratch_size} bytes of global scratch; use host descriptors or pointers.")
        found = re.search(r"\.reqntid\s+(\d+)", result.binary) if backend_options.get("num_ctas", 1) == 1 else None
        warps = int(found[1]) // 32 if found else backend_options["num_warps"]
        if warps != backend_options["num_warps"]:
            scratch = [result.global_scratch_size, result.global_scratch_align] if result.global_scratch_size else []
            arch = gpu_target.arch if isinstance(gpu_target.arch, int) else 0
            kernel = library.triton_kernel_call_lib.TritonKernel(
                result.name, warps, backend_options["num_ctas"], result.shared_mem_bytes, result.binary, ttir, arch, *scratch
            )
        return kernel, ttir, options, result

    def keeps_all(used_outputs, *others):
        *_, equation = others
        return [True] * len(equation.invars), equation

    library.pe.dce_rules[library.triton_kernel_call_p] = keeps_all
    library.CompilationResult.__post_init__ = with_default_keys
    library.TritonFunction._compile_kernel = corrected


def descriptor(array, block_shape, layout) -> Any:
    """A host TMA descriptor of a whole array, an operand of `call`; elements outside the array are read as 0.

    layout: the shared-memory layout of a block (Gluon's NVMMASharedLayout).
    """
    return _jax_triton().TensorDescriptor.from_array(array, tuple(block_shape), layout)


def call(
    kernel,
    *operands,
    out_type,
    grid,
    num_warps: int,
    aliases: dict[int | str, int] | None = None,
    maxnreg: int | None = None,
    num_stages: int | None = None,
    **arguments,
):
    """Launch `kernel` inside a jit: operands (arrays, descriptors, Python numbers), then its outputs, in the order of its parameters.

    out_type: one jax.ShapeDtypeStruct or a tuple of them; the result has the same form. The kernel's parameters that receive no
      operand are the outputs that are not aliased, as pointers.
    aliases: {operand: output}, the operand by its name or its position among the operands: the output takes over the operand's
      buffer, and the kernel has one parameter for both.
    arguments: the kernel's constexprs, and operands by name. A parameter of the kernel must not be called num_warps.
    maxnreg: the most registers a thread may use.

    Python numbers that are not constexpr are scalars of the launch (a new value does not compile again, except 1).
    Inside shard_map the outputs vary over the mesh axes of all operands.
    """
    library = _jax_triton()
    _ours.add(id(kernel))
    parameters = library.TritonFunction(kernel)
    names = list(parameters.non_constexpr_param_names)
    positional = list(parameters.param_names)[: len(operands)]
    given = [x for x in names if x in positional or x in arguments]
    positions = {given.index(key) if isinstance(key, str) else key: output for key, output in (aliases or {}).items()}
    # XLA hands the kernel all operands, then all outputs, and the aliased ones have no parameter of their own. They must be the last:
    # in front, they would shift every other output by one buffer (seen on an H200: a state written over the first tokens of o).
    leaves, form = jax.tree.flatten(out_type)
    order = sorted(range(len(leaves)), key=lambda i: i in positions.values())
    positions = {operand: order.index(output) for operand, output in positions.items()}
    if positions:
        # Barriers before and after: in a loop XLA fuses a kernel with the slices it reads and the stack its results go to, and forgets
        # that an aliased output is written through its operand (seen on an H200: windows under lax.map, the stacked o stayed 0).
        operands, arguments = _behind_barrier((operands, arguments))
    options = {} if maxnreg is None else {"maxnreg": maxnreg}
    with warnings.catch_warnings():
        # jax-triton would rather have refs than aliases. A ref is an effect, which custom_vjp and remat do not take.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        outputs = library.triton_call(
            *operands,
            kernel=kernel,
            out_type=tuple(leaves[i] for i in order),
            grid=grid,
            name=parameters.name,
            num_warps=num_warps,
            num_stages=num_stages,
            compute_capability=HOPPER if _capability() is None else None,  # lowering for a GPU that is not here
            backend_options=options,
            input_output_aliases=positions,
            **arguments,
        )
    if positions:
        outputs = jax.lax.optimization_barrier(outputs)
    arrays = [x for x in jax.tree.leaves((operands, arguments)) if isinstance(x, jax.Array)]
    outputs = [match_varying(outputs[order.index(i)], *arrays) for i in range(len(leaves))]
    return jax.tree.unflatten(form, outputs)


def _behind_barrier(tree) -> Any:
    """`tree` with its arrays, those of descriptors too, behind one optimization barrier."""
    leaves, form = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    for place, x in zip(places, jax.lax.optimization_barrier([leaves[i] for i in places]), strict=True):
        leaves[place] = x
    return jax.tree.unflatten(form, leaves)
