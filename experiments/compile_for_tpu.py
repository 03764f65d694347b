"""Compile a sharded train step for a TPU topology that is not there, in a process of its own.

    python -m experiments.compile_for_tpu REQUEST.json RESULT.json

`experiments.plan --compile` starts it: libtpu has to be told by the environment that it runs on no TPU, before JAX is imported
(see `environment`). It needs the extra `tpu-aot`. Nothing is allocated on any device.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

NO_TPU = {
    # Without all of these libtpu asks a metadata server which does not answer: 20 s instead of 0.5 s for a topology.
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing is run: two compiles at once disturb no one
}


class CompileError(RuntimeError):
    """The compiler refused the program, or the process died. The message holds its last lines."""


def environment() -> dict[str, str]:
    """This process's environment, changed so that libtpu compiles without a TPU."""
    return {**os.environ, **NO_TPU}


def compile_for_tpu(request: dict[str, Any], *, timeout: float) -> dict[str, Any]:
    """Compile in a subprocess.

    Args:
      request: {"config": ModelConfig.to_dict(), "mesh": sizes by axis, "topology": "v5p:4x4x8", "batch": rows, "context": tokens a
        row, "attention": "gather" or "ring", "transport": None or a name, "hlo": path for the compiled text, or None}.
      timeout: seconds.
    Returns:
      {"lower_seconds", "compile_seconds", "cpu_seconds" (of all threads), "memory": bytes a device by kind, "flops": of one
      device, loops counted once, "bytes_by_axis": see `moejax.planning.hlo_traffic`, "versions"}.
    Raises:
      CompileError: with the compiler's message.
    """
    root = pathlib.Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = pathlib.Path(folder, "request.json"), pathlib.Path(folder, "result.json")
        asked.write_text(json.dumps(request))
        command = [sys.executable, "-m", "experiments.compile_for_tpu", str(asked), str(answered)]
        try:
            done = subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise CompileError(
                f"not compiled in {timeout:.0f} s; give a larger --compile-minutes, or fewer layers or kinds of layers."
            ) from None
        if done.returncode or not answered.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise CompileError("the train step did not compile:\n" + "\n".join(lines[-12:]))
        return json.loads(answered.read_text())


def run(request: dict[str, Any]) -> dict[str, Any]:
    """The work of the subprocess; see `compile_for_tpu`."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    from moejax import HybridLM, ModelConfig
    from moejax.parallel.axes import MESH_AXES
    from moejax.parallel.layers import ModelParallel
    from moejax.planning.hlo_traffic import bytes_by_axis

    shape = tuple(request["mesh"][axis] for axis in MESH_AXES)
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=request["topology"]).devices
    except Exception as error:
        raise SystemExit(f"no topology {request['topology']!r}: {error}. Is libtpu there (pip install 'moejax[tpu-aot]')?") from None
    if len(devices) != np.prod(shape):
        raise SystemExit(f"{request['topology']} has {len(devices)} devices, the mesh {request['mesh']} {np.prod(shape)}; make them equal.")
    mesh = Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))
    parallel = ModelParallel(mesh, attention=request["attention"], transport=request["transport"])
    model = HybridLM(ModelConfig.from_dict(request["config"]), parallel=parallel)
    start = time.perf_counter()
    lowered = lower_train_step(model, rows=request["batch"], context=request["context"])
    lower_seconds = time.perf_counter() - start
    print(f"lowered in {lower_seconds:.1f} s", file=sys.stderr, flush=True)
    start = time.perf_counter()
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - start
    print(f"compiled in {compile_seconds:.1f} s", file=sys.stderr, flush=True)
    text = compiled.as_text() or ""
    if request.get("hlo"):
        pathlib.Path(request["hlo"]).write_text(text)
    return {
        "lower_seconds": lower_seconds,
        "compile_seconds": compile_seconds,
        "cpu_seconds": time.process_time(),
        "memory": memory(compiled),
        "flops": flops(compiled),
        "bytes_by_axis": bytes_by_axis(text, dict(zip(MESH_AXES, shape, strict=True))),
        "versions": {"jax": jax.__version__, "python": ".".join(map(str, sys.version_info[:3]))},
    }


def lower_train_step(model, *, rows: int, context: int):
    """The jitted step of `model` with AdamW, lowered from shapes alone: state and batch sharded as in training."""
    import jax
    import jax.numpy as jnp

    from moejax.parallel.axes import batch_sharding, parameter_shardings
    from moejax.train.optimizers import OptimizerConfig, adamw
    from moejax.train.state import init_state
    from moejax.train.step import make_train_step

    optimizer = adamw(OptimizerConfig())
    state = jax.eval_shape(lambda key: init_state(model, optimizer, key), jax.random.key(0))
    mesh = model.parallel.mesh
    shardings = parameter_shardings(state, mesh, model.parallel.rules)
    tokens = jax.ShapeDtypeStruct((rows, context), jnp.int32)
    batch = {"tokens": tokens, "segment_ids": tokens}
    step = jax.jit(
        make_train_step(model, optimizer),
        donate_argnums=0,
        in_shardings=(shardings, batch_sharding(mesh, model.parallel.rules)),
        out_shardings=(shardings, None),
    )
    return step.lower(state, batch)


def memory(compiled) -> dict[str, int]:
    """XLA's bytes of one device: arguments, outputs, what both share, temporaries, program."""
    stats = compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names}


def flops(compiled) -> float:
    """XLA's FLOPs of one device. It counts the body of a loop once, however often the loop turns."""
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return float((cost or {}).get("flops", 0.0))


def main() -> None:
    asked, answered = map(pathlib.Path, sys.argv[1:])
    answered.write_text(json.dumps(run(json.loads(asked.read_text()))))


if __name__ == "__main__":
    main()
