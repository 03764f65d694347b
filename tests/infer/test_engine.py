"""The engine: answers do not depend on what else is served, and nothing that goes wrong with one request reaches another."""

import dataclasses
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM
from moejax.infer import engine as engine_module
from moejax.infer import slots as device
from moejax.infer.cache import init_cache
from moejax.infer.engine import Engine, QueueFull, Request
from moejax.infer.generate import generate
from moejax.infer.sampling import make_sampling
from moejax.infer.weights import prepare
from moejax.parallel import MeshConfig, ModelParallel, make_mesh, parameter_shardings

CAPACITY, CHUNK = 96, 16
PROMPTS = np.random.default_rng(0).integers(0, 60, (12, CAPACITY))


class Served:
    """A model and its weights, engines over them, and answers of fresh engines that served nothing else."""

    def __init__(self, model, variables):
        self.model, self.variables, self.weights = model, variables, prepare(model, variables)
        self.known = {}

    def engine(self, slots, **settings):
        return Engine(self.model, None, **{"slots": slots, "capacity": CAPACITY, "chunk": CHUNK, "weights": self.weights, **settings})

    def solo(self, request, slots, **settings):
        key = (request, slots, *settings.items())
        if key not in self.known:
            self.known[key] = answer(self.engine(slots, **settings), request)
        return self.known[key]


@pytest.fixture(scope="session")
def served(short_toy, drawn):
    model = HybridLM(short_toy)
    return Served(model, jax.device_put(drawn(model), jax.devices()[0]))


def ask(index=0, length=20, new=6, **settings):
    return Request(tuple(PROMPTS[index, :length].tolist()), new, **settings)


def answer(engine, request):
    ticket = engine.submit(request)
    engine.run()
    assert ticket.state == "done", ticket.error
    return said(ticket)


def said(ticket):
    return ticket.tokens, ticket.log_probs


def compiled():
    return [program._cache_size() for program in (device.clear_slot, device.prefill_slot, device.decode_slots)]


def steps_until(engine, condition, most=200):
    for _ in range(most):
        if condition():
            return
        engine.step()
    raise AssertionError("it did not come to that")


def test_nothing_compiles_after_the_warm_up(served):
    """The first test of the file, so that no other has compiled what a warm-up forgets. The weights are committed to their device."""
    engine = served.engine(2)
    engine.warm_up()
    before = compiled()
    for index in range(6):
        engine.submit(ask(index, 1 + 13 * index, 1 + index, temperature=0.5 * (index % 2), top_k=index, stop_ids=(3,) * index))
    engine.run()
    engine.warm_up()
    answer(engine, ask())
    assert compiled() == before
    assert engine.stats()["finished"] == 7


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5}])
def test_a_fifth_prompt_while_four_answer(served, settings):
    """Public case I2: prompts of 3, 17, 64 and 65 tokens in chunks of 16, and one of 30 that comes while they answer.

    Each gives the bits of a fresh engine, and the tokens, log-probs (1e-5) and routed experts of `generate`, which reads prompts whole.
    """
    engine = served.engine(5, return_experts=True)
    tickets = [engine.submit(ask(index, length, 20, **settings)) for index, length in enumerate((3, 17, 64, 65))]
    steps_until(engine, lambda: len(tickets[3].tokens) > 1)
    assert [ticket.state for ticket in tickets] == ["decode"] * 4
    tickets.append(engine.submit(ask(4, 30, 8, **settings)))
    engine.run()
    given = {"capacity": CAPACITY, "weights": served.weights, "return_experts": True, "max_new_tokens": 20, **settings}
    expected = generate(served.model, None, [list(ticket.request.tokens) for ticket in tickets], **given)
    for row, ticket in enumerate(tickets):
        new, length = ticket.request.max_new_tokens, len(ticket.request.tokens)
        assert said(ticket) == served.solo(ticket.request, 5, return_experts=True)
        assert ticket.tokens == expected.tokens[row, :new].tolist() and ticket.finish_reason == "length"
        np.testing.assert_allclose(ticket.log_probs, expected.log_probs[row, :new], atol=1e-5)
        experts = np.stack(ticket.experts)
        assert experts.shape == (length + new, served.model.config.moe_layers, 2) and (experts[-1] == -1).all()
        np.testing.assert_array_equal(experts[:length], expected.prompt_experts[row, :length])
        np.testing.assert_array_equal(experts[length:-1], expected.experts[row, : new - 1])


@pytest.mark.parametrize("slots", [1, 2])
def test_a_reused_slot_leaks_nothing(served, slots):
    """Public case I1: after A has ended, B was cancelled in the middle and D while it was read, C is as in a fresh engine."""
    engine, last = served.engine(slots), ask(2, 33, 8)
    for request in [ask(0, 40, 6)] * slots:
        engine.submit(request)
    engine.run()
    cancelled = [engine.submit(ask(1, 30, 40)) for _ in range(slots)]
    steps_until(engine, lambda: all(len(ticket.tokens) > 3 for ticket in cancelled))
    for ticket in cancelled:
        engine.cancel(ticket)
    assert answer(engine, last) == served.solo(last, slots)
    aborted = [engine.submit(ask(3, 80, 4)) for _ in range(slots)]
    before = engine.stats()["prompt_tokens"]
    steps_until(engine, lambda: engine.stats()["prompt_tokens"] > before + 2 * CHUNK)
    assert aborted[0].state == "prefill"
    for ticket in aborted:
        engine.cancel(ticket)
    assert answer(engine, last) == served.solo(last, slots)
    together = [engine.submit(request) for request in (last, ask(4, 50, 3), last, ask(5, 1, 9), last, last, ask(0, 40, 6), last)]
    engine.run()  # fewer slots than requests
    for ticket in together:
        assert said(ticket) == served.solo(ticket.request, slots)
    assert {ticket.state for ticket in cancelled + aborted} == {"cancelled"}
    assert all(ticket.finish_reason == "cancelled" for ticket in cancelled + aborted)


def cycle(served, count, seed, slots=2):
    """Random requests, submitted and cancelled at random steps: each ends as it does alone, cancelled ones as its beginning."""
    rng, engine = np.random.default_rng(seed), served.engine(slots, max_queue=count)
    waiting, tickets, streamed = [], [], {}
    for _ in range(count):
        hot = rng.random() < 0.5
        settings = {"temperature": 0.9, "top_k": int(rng.integers(0, 30)), "top_p": 0.95, "seed": int(rng.integers(99))} if hot else {}
        stop = tuple(rng.integers(0, 60, 3).tolist())
        waiting.append(ask(rng.integers(12), rng.integers(1, 50), int(rng.integers(1, 14)), stop_ids=stop, **settings))
    keep = lambda ticket, token, log_prob: streamed.setdefault(ticket.id, []).append((token, log_prob))
    while engine.step() or waiting:
        if waiting and rng.random() < 0.4:
            tickets.append(engine.submit(waiting.pop(), on_token=keep))
        if tickets and rng.random() < 0.15:
            engine.cancel(tickets[rng.integers(len(tickets))])
    assert len(tickets) == count
    for ticket in tickets:
        tokens, log_probs = served.solo(ticket.request, slots)
        have = len(ticket.tokens)
        assert ticket.state == "cancelled" or (ticket.state == "done" and have == len(tokens))
        assert said(ticket) == (tokens[:have], log_probs[:have])
        assert streamed.get(ticket.id, []) == list(zip(*said(ticket), strict=True))
        if ticket.state == "done":
            assert ticket.finish_reason == ("stop" if tokens[-1] in ticket.request.stop_ids else "length")
            assert not set(tokens[:-1]) & set(ticket.request.stop_ids)
    states = [ticket.state for ticket in tickets]
    stats = engine.stats()
    assert (stats["finished"], stats["cancelled"], stats["failed"]) == (states.count("done"), states.count("cancelled"), 0)
    assert stats["busy"] == stats["queued"] == 0 and stats["generated_tokens"] == sum(len(ticket.tokens) for ticket in tickets)
    reasons = {ticket.finish_reason for ticket in tickets}
    assert reasons == {"stop", "length", "cancelled"}, "the cycle should meet every end; change its seed"


def test_thirty_random_requests(served):
    cycle(served, 30, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_hundred_random_requests(served, slots):
    cycle(served, 100, seed=2, slots=slots)


@pytest.mark.slow
def test_heads_cut_over_a_mesh(served):
    """The same answer up to rounding, and no compile after the warm-up."""
    mesh = make_mesh(MeshConfig(tensor=2))
    model = HybridLM(served.model.config, parallel=ModelParallel(mesh))
    variables = jax.device_put(served.variables, parameter_shardings(served.variables, mesh))
    engine = Engine(model, variables, slots=2, capacity=CAPACITY, chunk=CHUNK)
    engine.warm_up()
    before = compiled()
    tokens, log_probs = answer(engine, ask(2, 33, 8))
    assert compiled() == before
    assert tokens == served.solo(ask(2, 33, 8), 2)[0]
    np.testing.assert_allclose(log_probs, served.solo(ask(2, 33, 8), 2)[1], atol=1e-5)


def test_warm_up_leaves_no_trace_and_needs_peace(served):
    engine = served.engine(2)
    engine.warm_up()
    assert answer(engine, ask()) == served.solo(ask(), 2)
    engine.submit(ask())
    engine.step()
    with pytest.raises(RuntimeError, match="while requests run"):
        engine.warm_up()


def test_a_chunk_copies_no_row_of_the_cache(served):
    """At 2 slots of 65536 tokens the cache is 10 MB; a chunk needs less than 2 MB beside it, and writes in place."""
    config = served.model.config.replace(pattern="M", layers=1, dense_layers=1)
    model, key, tokens = HybridLM(config), jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
    weights, cache = jax.eval_shape(lambda: (prepare(model, model.init(key, tokens)), init_cache(config, 2, 65536, dtype="float32")))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    operands = (weights, cache, number(2), make_sampling(2), number(), number(CHUNK), number())
    memory = device.prefill_slot.lower(*operands, return_experts=False).compile().memory_analysis()
    assert total > 10e6 and memory.alias_size_in_bytes >= total
    assert memory.temp_size_in_bytes < 2e6


def raising_once(monkeypatch, name, error, *, after=True):
    """The named program fails once: after it has run, so that the cache is really gone, or before."""
    real, failed = getattr(device, name), []

    def program(*operands, **settings):
        if failed:
            return real(*operands, **settings)
        failed.append(True)
        if after:
            real(*operands, **settings)
        raise error

    monkeypatch.setattr(device, name, program)


@pytest.mark.parametrize("name", ["prefill_slot", "decode_slots", "clear_slot"])
@pytest.mark.parametrize("after", [True, False])
def test_an_error_on_the_device_fails_what_ran_and_nothing_else(served, monkeypatch, name, after):
    engine = served.engine(2)
    answer(engine, ask(3, 25, 4))
    running = [engine.submit(ask(index, 20, 30)) for index in range(2)]
    waiting = engine.submit(ask(2, 33, 8))
    if name == "decode_slots":
        steps_until(engine, lambda: all(len(ticket.tokens) > 3 for ticket in running))
    raising_once(monkeypatch, name, RuntimeError("RESOURCE_EXHAUSTED: planted"), after=after)
    engine.run()
    failed = running if name != "clear_slot" else running[:1]
    for ticket in failed:
        assert (ticket.state, ticket.finish_reason) == ("failed", "error") and ticket.wait(0)
        assert ticket.error == "the step failed: RuntimeError: RESOURCE_EXHAUSTED: planted"
    assert said(waiting) == served.solo(waiting.request, 2)
    assert engine.stats()["failed"] == len(failed) and engine.stats()["busy"] == 0
    assert answer(engine, ask(2, 33, 8)) == served.solo(waiting.request, 2)


def test_an_error_that_comes_with_the_transfer(served, monkeypatch):
    """Errors of a running program arrive when its results are fetched, a step later."""
    engine, real = served.engine(2), jax.device_get
    running, waiting = [engine.submit(ask(index, 20, 30)) for index in range(2)], engine.submit(ask(2, 33, 8))
    steps_until(engine, lambda: len(running[1].tokens) > 3)
    planted = [RuntimeError("late")]
    monkeypatch.setattr(jax, "device_get", lambda tree: (_ for _ in ()).throw(planted.pop()) if planted else real(tree))
    engine.run()
    assert [ticket.error for ticket in running] == ["the step failed: RuntimeError: late"] * 2
    assert said(waiting) == served.solo(waiting.request, 2)


def test_an_interrupt_is_raised_and_survived(served, monkeypatch):
    engine = served.engine(2)
    running, done = engine.submit(ask(0, 20, 30)), []
    raising_once(monkeypatch, "decode_slots", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert running.state == "failed"

    def interrupted(ticket, token, log_prob):
        raise KeyboardInterrupt

    running = [engine.submit(ask(0, 20, 30), on_token=interrupted), engine.submit(ask(1, 20, 30), on_done=done.append)]
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert [ticket.state for ticket in running] == ["failed"] * 2 and done == running[1:]
    assert answer(engine, ask()) == served.solo(ask(), 2)


def test_a_device_that_stays_broken_drains_the_queue(served, monkeypatch):
    engine = served.engine(2)

    def broken(*operands, **settings):
        raise RuntimeError("gone")

    monkeypatch.setattr(device, "prefill_slot", broken)
    monkeypatch.setattr(device, "empty_slots", broken)
    tickets = [engine.submit(ask(index)) for index in range(5)]
    engine.run()
    assert [ticket.state for ticket in tickets] == ["failed"] * 5
    monkeypatch.undo()
    assert answer(engine, ask()) == served.solo(ask(), 2)


def test_logits_that_are_no_distribution_fail_their_request_alone(served):
    """A token with a NaN embedding: the request that reads it fails, its neighbour and the next in its slot keep their bits."""
    said_alone = served.solo(ask(0, 20, 30), 2)[0] + served.solo(ask(2, 33, 8), 2)[0]
    poison = next(token for token in range(60, 64) if token not in said_alone)  # prompts have ids below 60
    weights = dataclasses.replace(served.weights, embedding=served.weights.embedding.at[poison].set(jnp.nan))
    engine = served.engine(2, weights=weights)
    neighbour = engine.submit(ask(0, 20, 30))
    prompts = [(*PROMPTS[1, :length].tolist(), poison, 5) for length in (3, 40)]
    bad = [engine.submit(Request(prompt, 9, temperature=heat)) for prompt, heat in zip(prompts, (0.0, 1.0), strict=True)]
    after = engine.submit(ask(2, 33, 8))
    engine.run()
    for ticket in bad:
        assert (ticket.state, ticket.finish_reason, ticket.tokens) == ("failed", "error", [])
    assert bad[0].error == "the logits at position 5 are no distribution (NaN or infinite); nothing drawn."
    assert said(neighbour) == served.solo(neighbour.request, 2)
    assert said(after) == served.solo(after.request, 2)
    assert engine.stats()["failed"] == 2


def test_cancel_frees_the_slot_at_the_next_step(served):
    engine, done = served.engine(2), []
    tickets = [engine.submit(ask(index, length, 30), on_done=done.append) for index, length in enumerate((10, 65, 10, 10))]
    steps_until(engine, lambda: len(tickets[0].tokens) > 2)
    assert [ticket.state for ticket in tickets] == ["decode", "prefill", "queued", "queued"]
    assert engine.stats()["busy"] == 2 and engine.stats()["queued"] == 2
    had = [list(ticket.tokens) for ticket in tickets]
    for ticket in tickets[:3]:
        engine.cancel(ticket)
    engine.step()
    assert [ticket.state for ticket in tickets] == ["cancelled"] * 3 + ["decode"]
    assert engine.stats()["busy"] == 1 and engine.stats()["queued"] == 0
    assert [ticket.tokens for ticket in tickets[:3]] == had[:3] and sorted(done, key=lambda ticket: ticket.id) == tickets[:3]
    assert all(ticket.wait(0) for ticket in tickets[:3]) and not tickets[3].wait(0)
    engine.run()
    assert said(tickets[3]) == served.solo(tickets[3].request, 2)
    engine.cancel(tickets[3])
    engine.run()
    assert tickets[3].state == "done" and engine.stats()["cancelled"] == 3


def test_callbacks_that_raise_fail_their_own_request(served):
    engine = served.engine(2)

    def bad(ticket, token, log_prob):
        if len(ticket.tokens) == 3:
            raise ValueError("no room to write")

    tickets = [engine.submit(ask(0, 20, 30), on_token=bad), engine.submit(ask(1, 20, 3), on_token=bad), engine.submit(ask(2, 33, 8))]
    engine.run()
    for ticket in tickets[:2]:
        assert (ticket.state, ticket.finish_reason) == ("failed", "error") and len(ticket.tokens) == 3
        assert ticket.error == "on_token raised ValueError: no room to write"
    assert said(tickets[2]) == served.solo(tickets[2].request, 2)
    ended = engine.submit(ask(), on_done=lambda ticket: 1 / 0)
    assert answer(engine, ask()) == said(ended) == served.solo(ask(), 2)


def test_callbacks_may_use_the_engine(served):
    """They run on the stepping thread; they may submit and cancel, and may not step."""
    engine, threads, more, errors = served.engine(2), set(), [], []

    def on_token(ticket, token, log_prob):
        threads.add(threading.get_ident())
        if len(ticket.tokens) == 4:
            engine.cancel(ticket)
            more.append(engine.submit(ask(2, 33, 8)))
            with pytest.raises(RuntimeError, match="only one thread may step") as caught:
                engine.step()
            errors.append(caught)

    ticket = engine.submit(ask(0, 20, 30), on_token=on_token)
    engine.run()
    assert ticket.state == "cancelled" and len(ticket.tokens) == 4 and len(errors) == 1
    assert threads == {threading.get_ident()}
    assert said(more[0]) == served.solo(more[0].request, 2)


def test_streaming_order(served):
    """Each request's tokens in order, its finish known at the last one; requests of one step in the order of their slots."""
    engine, seen = served.engine(2), []
    stream = lambda ticket, token, log_prob: seen.append((ticket.id, len(ticket.tokens), token, ticket.finish_reason))
    tickets = [engine.submit(ask(index, 10, 5), on_token=stream) for index in range(2)]
    engine.run()
    for ticket in tickets:
        own = [entry for entry in seen if entry[0] == ticket.id]
        assert [entry[1] for entry in own] == [1, 2, 3, 4, 5] and [entry[2] for entry in own] == ticket.tokens
        assert [entry[3] for entry in own] == [None] * 4 + ["length"]
    assert any(a[0] != b[0] for a, b in itertools.pairwise(seen)), "answers should interleave"


def test_submitting_from_many_threads(served):
    engine, stop, answers = served.engine(2), threading.Event(), []

    def user(index):
        for _ in range(3):
            ticket = engine.submit(ask(index, 5 + index, 4))
            assert ticket.wait(60)
            answers.append(ticket)

    def serve():
        while not stop.is_set():
            if not engine.step():
                stop.wait(0.001)

    threads = [threading.Thread(target=user, args=(index,)) for index in range(6)]
    server = threading.Thread(target=serve)
    for thread in [server, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    server.join()
    assert len(answers) == 18 and len({ticket.id for ticket in answers}) == 18
    for ticket in answers:
        assert said(ticket) == served.solo(ticket.request, 2)


def test_the_queue_is_bounded(served):
    engine = served.engine(1, max_queue=2)
    for _ in range(2):
        engine.submit(ask())
    with pytest.raises(QueueFull, match="2 requests wait"):
        engine.submit(ask())
    engine.step()
    engine.submit(ask())
    engine.run()
    assert engine.stats()["finished"] == 3 and issubclass(QueueFull, RuntimeError)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 4), "tokens is empty"),
        (Request((1, 64), 4), r"tokens holds 64; ids must lie in \[0, 64\)"),
        (Request((1, -1), 4), "tokens holds -1"),
        (Request((1, 2**32), 4), "tokens holds 4294967296; ids must lie in"),
        (Request((1, 2**63), 4), "tokens holds 9223372036854775808; ids must lie in"),
        (Request((True, 2), 4), "tokens holds True"),
        (Request(np.array([True]), 4), "tokens is bool"),
        (Request([[1], [2, 3]], 4), "tokens holds sequences"),
        (Request((1.0, 2.0), 4), "tokens is float64"),
        (Request(((1, 2),), 4), r"\[1, 2\]; it must be a sequence"),
        (Request((1, 2), 0), "max_new_tokens is 0"),
        (Request((1, 2), 2.0), "max_new_tokens is 2.0"),
        (Request((1, 2), True), "max_new_tokens is True"),
        (Request((1, 2), 95), "97 in all, and a slot holds 96"),
        (Request((1, 2), 4, stop_ids=(99,)), "stop_ids holds 99"),
        (Request((1, 2), 4, temperature=-1.0), "temperature is -1.0"),
        (Request((1, 2), 4, temperature=1e39), r"temperature is 1e\+39"),
        (Request((1, 2), 4, top_p=0.0), "top_p is 0.0"),
        (Request((1, 2), 4, top_k=-3), "top_k is -3"),
        (Request((1, 2), 4, seed=-3), "seed is -3"),
    ],
)
def test_bad_requests(served, request_, message):
    engine = served.known.setdefault("idle", served.engine(1))
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)
    assert engine.stats()["queued"] == 0


def test_bad_engines(served, toy):
    for name in ("slots", "capacity", "chunk", "max_queue"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            served.engine(**{"slots": 1, name: 0})
    dense = HybridLM(toy.replace(dense_layers=3))
    with pytest.raises(ValueError, match="no layer of the model has routed experts"):
        Engine(dense, None, slots=1, capacity=8, return_experts=True)
    with pytest.raises(ValueError, match="drop dtype='bfloat16'"):
        served.engine(1, dtype="bfloat16")
    cut = HybridLM(served.model.config, parallel=ModelParallel(make_mesh(MeshConfig(expert=2))))
    with pytest.raises(ValueError, match="mesh cuts rows into 2"):
        Engine(cut, served.variables, slots=1, capacity=8)
    with pytest.raises(ValueError, match=r"another configuration than the model \(.*dense_layers.*\); give the model") as caught:
        Engine(dense, None, slots=1, capacity=8, weights=served.weights)
    assert "dtype=" not in str(caught.value)


def test_an_unknown_state_dtype_comes_before_the_copy_of_the_weights(served, monkeypatch):
    copied = []
    monkeypatch.setattr(engine_module, "prepare", lambda *operands, **settings: copied.append(operands) or served.weights)
    for state_dtype in ("float16", "int8", "half a float"):
        with pytest.raises(ValueError, match=f"state_dtype is {state_dtype}"):
            Engine(served.model, served.variables, slots=1, capacity=8, state_dtype=state_dtype)
    assert not copied


def test_a_full_slot(served):
    """Prompt and answer may fill the capacity to the last token, with a chunk that does not divide it."""
    engine = served.engine(1, capacity=CAPACITY - 3)
    tickets = [engine.submit(ask(0, length, CAPACITY - 3 - length)) for length in (CAPACITY - 4, 80, 81, 1)]
    engine.run()
    for ticket in tickets:
        tokens, log_probs = served.solo(ticket.request, 1)
        assert ticket.finish_reason == "length" and ticket.tokens == tokens
        np.testing.assert_allclose(ticket.log_probs, log_probs, atol=1e-5)  # another capacity is another program
