"""What a checkpoint or snapshot says about a pytree of arrays: names, shapes, dtypes, placement, and how two trees differ."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding


def named_leaves(tree: Any) -> dict[str, Any]:
    """{"params.block.w": leaf}. ValueError: a leaf that is no array, two leaves of one name."""
    named = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(f"leaf {name} is {type(leaf).__name__}; a checkpoint holds arrays, metadata the rest.")
        if name in named:
            raise ValueError(f"two leaves are called {name}; names must differ.")
        named[name] = leaf
    return named


def is_key(leaf: Any) -> bool:
    """Whether the leaf is an array of typed random keys (`jax.random.key`)."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe_leaf(leaf: Any) -> str:
    """ "float32[3,4]"; for typed keys the generator is part of it: "key<fry>[]"."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def differences(saved: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """One line for each leaf that is missing, not expected, or of another shape or dtype; sorted by name."""
    lines = [f"  {name}: saved {saved[name]}, not expected" for name in saved.keys() - wanted.keys()]
    lines += [f"  {name}: expected {wanted[name]}, not saved" for name in wanted.keys() - saved.keys()]
    both = saved.keys() & wanted.keys()
    lines += [f"  {name}: saved {saved[name]}, expected {wanted[name]}" for name in both if saved[name] != wanted[name]]
    return sorted(lines)


def check_fits(what: str, saved: dict[str, str], template: dict[str, Any]) -> None:
    """ValueError with every difference between what was saved and a template's leaves. Nothing is cast or padded."""
    lines = differences(saved, {name: describe_leaf(leaf) for name, leaf in template.items()})
    if lines:
        raise ValueError(
            f"{what} does not fit: {len(lines)} leaves differ ({len(saved)} saved, {len(template)} expected). "
            "Build the state with the configuration the run was started with.\n" + "\n".join(lines)
        )


def words(leaf: Any) -> Any:
    """The plain array behind a leaf: typed keys become their uint32 words, one more axis."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def from_words(plain: Any, leaf: Any) -> Any:
    """The leaf that `words` came from, typed as `leaf` (an array or `jax.ShapeDtypeStruct`)."""
    # A ShapeDtypeStruct names its generator in the dtype only ("key<fry>" is threefry2x32).
    return jax.random.wrap_key_data(plain, impl=leaf.dtype._impl.name) if is_key(leaf) else plain


def target(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and placement of `words(leaf)`."""
    # A key's sharding names its own axes; the words behind each key are one more axis, not sharded.
    plain = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=getattr(leaf, "sharding", None))


def placement(leaf: Any) -> str:
    """Where a leaf lies: its PartitionSpec on a mesh; "" elsewhere."""
    sharding = getattr(leaf, "sharding", None)
    return str(tuple(sharding.spec)) if isinstance(sharding, NamedSharding) else ""


def mesh_axes(leaves: dict[str, Any]) -> dict[str, int]:
    """{axis: size} of the mesh that the leaves lie on; {} without one."""
    for leaf in leaves.values():
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return {str(axis): int(size) for axis, size in sharding.mesh.shape.items()}
    return {}


def exact_json(metadata: dict) -> dict:
    """`metadata` as JSON gives it back. ValueError when that is not what was put in."""
    try:
        again = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata cannot be written as JSON: {error}") from None
    if again != metadata:
        raise ValueError("metadata changes when written as JSON (a tuple, a key that is no string); use plain values.")
    return again


def own_copy(leaf: Any) -> Any:
    """NumPy leaves copied: the caller may write into them as soon as `save` is back."""
    return leaf if isinstance(leaf, jax.Array) else np.array(leaf)
