"""The GPU kernels of KDA one by one: ms, bytes moved, TB/s. Called by `kda.py --stages`.

Bytes are those of the arrays a stage must read and write once, counted from the arrays themselves. A stage is timed inside one jit
call that runs it on several input sets (as many as fit in `room` bytes), because a call of its own costs 0.1 ms on the host; every
output is returned, or XLA would drop the kernel.

Shapes as in the kernels: B batch, T tokens, H heads, K, V channels, N chunks of C = 32 tokens, S walks a row; scratch is [B,H,N,...].
"""

import importlib
import types
from typing import Any

import jax
import jax.numpy as jnp

CHUNK, SEGMENT = 32, 4096


def kernels():
    """The public functions of the Triton files. One that cannot be imported raises when it is called: the others are still timed."""
    found: dict[str, Any] = {}
    walks = ("walk_forward", "walk_both", "walk_reverse", "walk_summary")
    for file, names in (("prep", ("prep",)), ("walk", walks), ("grads", ("grads",))):
        try:
            module = importlib.import_module(f"moejax.kernels.kda.triton_{file}")
            found |= {name: getattr(module, name) for name in names}
        except (ImportError, AttributeError) as error:
            found |= {name: missing(error) for name in names}
    return types.SimpleNamespace(**found)


def missing(error):
    def call(*args, **options):
        raise ImportError(str(error))

    return call


def stand_in():
    """Functions with the kernels' shapes and no mathematics: a rehearsal of this file without a GPU."""
    from collections import namedtuple

    Prepared = namedtuple("Prepared", "neg_w q_in k_out t p decay")

    def sizes(q, g, chunks):
        return q.shape[0], g.shape[2], chunks, CHUNK

    def prep(q, k, g, beta, A_log, dt_bias, ids, *, first, chunks, scale, lower_bound, fused):
        lead, K, x = sizes(q, g, chunks), q.shape[3], q.reshape(-1)[0]
        tokens, square = jnp.full((*lead, K), x), jnp.full((*lead, CHUNK), x)
        return Prepared(tokens, tokens, tokens, square, square, jnp.full((*lead[:3], K), x, jnp.float32))

    def walk_forward(p, v, state, bounds, *, first, out=None):
        return v, state

    def walk_both(p, v, state, d_o, d_state, bounds, *, first):
        V, lead = v.shape[3], p.neg_w.shape[:4]
        kept = (jnp.full((*lead[:3], V, p.neg_w.shape[4]), v.reshape(-1)[0]), jnp.full((*lead, V), v.reshape(-1)[0]))
        return *kept, d_state, *kept

    def walk_reverse(p, d_o, d_state, bounds, *, first):
        return d_state

    def walk_summary(p, v, bounds, *, first):
        lead = (*bounds.shape[:2], v.shape[2], p.neg_w.shape[4])
        return jnp.full((*lead, v.shape[3]), v.reshape(-1)[0]), jnp.full((*lead, lead[-1]), v.reshape(-1)[0])

    def grads(q, k, g, beta, A_log, dt_bias, ids, t, d_o, states, v_new, d_states, d_v_new, *, first, scale, lower_bound, fused, out=None):
        return q, k, d_o, g, beta, jnp.zeros(t.shape[:3]), jnp.zeros((*t.shape[:3], q.shape[3]))

    walks = dict(walk_forward=walk_forward, walk_both=walk_both, walk_reverse=walk_reverse, walk_summary=walk_summary)
    return types.SimpleNamespace(prep=prep, **walks, grads=grads)


def size(*trees) -> int:
    """Bytes of arrays, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


def bounds(batch, tokens, length):
    """[B,S,2] chunk ranges of walks of `length` tokens."""
    chunks, step = -(-tokens // CHUNK), -(-length // CHUNK)
    ranges = [[begin, min(begin + step, chunks)] for begin in range(0, chunks, step)]
    return jnp.broadcast_to(jnp.asarray(ranges, jnp.int32), (batch, len(ranges), 2))


def first_run(real, dry, args):
    """What a stage hands to the next; of the right shapes also where the stage does not work yet."""
    try:
        return jax.block_until_ready(jax.jit(real)(*args))
    except Exception:  # it fails again, and is reported, when it is timed
        return jax.jit(dry)(*args)


def stages(k, operands, lower_bound):
    """[(stage, function of one input set, the set, arrays that it does not read)]; operands as in gated_kda. Earlier stages run once."""
    q, key, v, raw, logits, A_log, bias = operands
    batch, tokens, heads, V = v.shape
    K, chunks = q.shape[3], -(-tokens // CHUNK)
    common = {"first": 0, "scale": K**-0.5, "lower_bound": lower_bound, "fused": True}
    inputs = (q, key, raw, logits, A_log, bias)
    straight, parts = bounds(batch, tokens, tokens), bounds(batch, tokens, SEGMENT)
    state = jnp.zeros((batch, 1, heads, K, V), jnp.float32)
    ends = jnp.zeros((batch, parts.shape[1], heads, K, V), jnp.float32)
    prep = lambda k: lambda *x: k.prep(*x, None, chunks=chunks, **common)
    forward = lambda p, v: k.walk_forward(p, v, state, straight, first=0)
    both = lambda k: lambda p, v, d_o: k.walk_both(p, v, state, d_o, state, straight, first=0)
    reverse = lambda p, d_o: k.walk_reverse(p, d_o, ends, parts, first=0)
    summary = lambda p, v: k.walk_summary(p, v, parts, first=0)
    grads = lambda *x: k.grads(*x[:6], None, *x[6:], **common)

    dry = stand_in()
    p = first_run(prep(k), prep(dry), inputs)
    d_o = v[:, ::-1]
    kept = first_run(both(k), both(dry), (p, v, d_o))
    for_grads = (*inputs, p.t, d_o, *kept[:2], *kept[3:])

    yield "prep", prep(k), inputs, ()
    yield "walk forward", forward, (p, v), ()
    yield "walk both", both(k), (p, v, d_o), ()
    yield "walk reverse", reverse, (p, v), (p.t,)
    yield "walk summary", summary, (p, v), (p.q_in, p.p)
    yield "grads", grads, for_grads, ()


def copies(args, n):
    """n sets whose bits differ (each is scaled by less than 1), so that XLA cannot merge their kernels."""
    change = jax.jit(lambda tree, i: jax.tree.map(lambda x: x * (1 - i / 64).astype(x.dtype), tree))
    return [args] + [change(args, jnp.float32(i)) for i in range(1, n)]


def time_stages(k, operands, lower_bound, timed, room=24e9, only=()):
    """-> [(stage, ms, bytes, error or None)], one after another so that a stage that fails costs only itself."""
    rows = []
    for name, function, args, skipped in stages(k, operands, lower_bound):
        if only and not any(text in name for text in only):
            continue
        ms = nbytes = error = many = sets = None
        try:
            nbytes = size(args) - size(skipped) + size(jax.eval_shape(function, *args))
            n = int(max(1, min(10, room // (2 * nbytes))))
            sets = copies(args, n)
            many = jax.jit(lambda *sets, function=function: [function(*x) for x in sets])
            ms = timed(many, [tuple(sets)]) / n
        except Exception as failure:  # a kernel that does not compile or launch: the others are still wanted
            error = f"{type(failure).__name__}: {failure}".splitlines()[0][:160]
        rows.append((name, ms, nbytes, error))
    return rows
