"""Alarms: silent on noise, once per fault, the same decisions after a resume in the middle of a window."""

import dataclasses
import json

import numpy as np
import pytest

from moejax.train.alarms import ADVICE, DeadTrend, MonitorConfig, Monitors, robust_z

LAYERS = 3


def healthy_metrics(seed, steps=1000):
    """A run as real ones look: a falling loss with noise that differs from batch to batch (now and then a harder batch), gradient
    norms that are log-normal, MaxVio and dead experts that scatter, data waits of a few percent."""
    rng = np.random.default_rng(seed)
    trend = 2.0 + 8.0 * (1 + np.arange(steps)) ** -0.35
    noise = 0.02 * rng.standard_t(12, steps) * trend
    for step in range(steps):
        yield {
            "loss": np.float32(trend[step] + noise[step]),
            "grad_norm": np.float32(rng.lognormal(0, 0.4) * (1 + 3 * np.exp(-step / 50))),
            "skipped": np.int32(0),
            "max_violation": 1.5 + 0.5 * rng.standard_normal(LAYERS) + 2 * np.exp(-step / 40),
            "dead_experts": rng.poisson(3.0 + 20 * np.exp(-step / 60), LAYERS),
            "max_logit": 40 + 10 * rng.standard_normal((2, 4)),
            "wall": {"seconds": 1.0 + 0.1 * rng.random(), "data_wait": 0.05 * rng.random() + (3.0 if step == 0 else 0)},
        }


def drive(metrics, monitors=None, first=1):
    """-> (events, [(step, action)] of verdicts other than go)."""
    monitors = Monitors() if monitors is None else monitors
    events, actions = [], []
    for step, values in enumerate(metrics, first):
        verdict = monitors.observe(step, values)
        events += verdict.events
        actions += [(step, verdict.action)] if verdict.action != "go" else []
        assert bool(verdict.reason) == (verdict.action != "go")
    return events, actions


def named(events):
    return [(event["event"], event.get("alarm"), event["step"]) for event in events]


def change(metrics, changes):
    """Replace values at given steps (from 1): {step: {name: value or function of the old value}}."""
    for step, values in enumerate(metrics, 1):
        new = {name: value(values[name]) if callable(value) else value for name, value in changes.get(step, {}).items()}
        yield values | new


@pytest.mark.parametrize("seed", range(6))
def test_noise_fires_nothing(seed):
    events, actions = drive(healthy_metrics(seed))
    assert events == [] and actions == []


def test_slow_drift_is_no_spike():
    """Half a nat up over 900 steps: bad, but nothing a rollback of some steps would mend."""
    for sign in (1, -1):
        drift = [m | {"loss": 3 + sign * step * 5e-4 + 0.02 * np.sin(step * 1.7)} for step, m in enumerate(healthy_metrics(0))]
        events, actions = drive(drift)
        assert events == [] and actions == []


def test_one_spike_warns_once_and_clears_once():
    up = {"loss": lambda loss: loss + 3}
    events, actions = drive(change(healthy_metrics(1, 400), {200: up, 205: up}))
    assert actions == []
    # the second spike falls in the 16 healthy steps that the alarm waits for
    assert named(events) == [("alarm", "loss_spike", 200), ("alarm_cleared", "loss_spike", 221)]
    assert events[0]["value"] > 6 and events[0]["action"] == "warn" and "robust z" in events[0]["rule"]
    assert events[0]["advice"] == ADVICE["loss_spike"]
    assert json.loads(json.dumps(events, allow_nan=False)) == events


def test_three_in_a_row_roll_back():
    up = {"loss": lambda loss: loss + 3}
    two, _ = drive(change(healthy_metrics(2, 300), {200: up, 201: up, 203: up}))
    assert all(event["alarm"] == "loss_spike" for event in two)
    for action in ("rollback", "stop"):
        monitors = Monitors(MonitorConfig(on_divergence=action))
        events, actions = drive(change(healthy_metrics(2, 300), {200: up, 201: up, 202: up, 203: up}), monitors)
        assert actions == [(202, action)]
        assert ("alarm", "loss_divergence", 202) in named(events)
    _, actions = drive(change(healthy_metrics(2, 300), {s: up for s in range(200, 204)}), Monitors(MonitorConfig(on_divergence="warn")))
    assert actions == []


def test_a_downward_jump_is_no_spike():
    events, _ = drive(change(healthy_metrics(3, 300), {s: {"loss": lambda loss: loss - 1.5} for s in range(200, 301)}))
    assert events == []


def test_skipped_updates_are_counted_and_roll_back():
    nan = {"loss": np.float32("nan"), "grad_norm": np.float32("inf"), "skipped": 1}
    config = MonitorConfig(skipped_limit=3)
    two, actions = drive(change(healthy_metrics(4, 300), {100: nan, 101: nan, 103: nan}), Monitors(config))
    assert actions == [] and [event["event"] for event in two] == ["skipped_update"] * 3
    assert [(event["in_a_row"], event["total"]) for event in two] == [(1, 1), (2, 2), (1, 3)]
    assert two[0]["loss"] == "nan" and two[0]["grad_norm"] == "inf"
    monitors = Monitors(config)
    events, actions = drive(change(healthy_metrics(4, 300), {s: nan for s in range(100, 106)}), monitors)
    assert actions == [(102, "rollback")]  # once, although three more follow
    assert [e for e in named(events) if e[1]] == [("alarm", "non_finite", 102), ("alarm_cleared", "non_finite", 121)]
    assert monitors.skipped == 6


@pytest.mark.parametrize("poison", [{"loss": np.nan}, {"grad_norm": np.inf}, {"loss": 1e9, "skipped": 1}])
def test_skipped_steps_leave_the_windows_alone(poison):
    """Neither in the saved state, nor in any later decision."""
    clean, hurt = Monitors(), Monitors()
    source = list(healthy_metrics(5, 200))
    drive(source, clean)
    drive([*source[:100], source[100] | poison, *source[100:]], hurt)
    a, b = clean.state(), hurt.state()
    assert a["windows"] == b["windows"] and a["over"] == b["over"] and a["dead"] == b["dead"]
    assert b["skipped"] == 1 and not hurt.alarms["loss_spike"].active
    json.dumps(b, allow_nan=False)


def test_non_finite_extras_are_never_stored():
    bad = {"max_violation": np.array([np.nan, 1.0, np.inf]), "max_logit": np.nan, "wall": {"seconds": np.nan, "data_wait": np.inf}}
    monitors = Monitors()
    events, actions = drive(change(healthy_metrics(6, 200), {s: bad for s in range(90, 95)}), monitors)
    assert events == [] and actions == []
    json.dumps(monitors.state(), allow_nan=False)


def test_gradient_norm():
    events, actions = drive(change(healthy_metrics(7, 300), {s: {"grad_norm": 25.0} for s in range(150, 153)}))
    assert named(events) == [("alarm", "grad_norm", 150), ("alarm_cleared", "grad_norm", 168)] and actions == []
    assert events[0]["value"] > 10


def test_max_violation_of_one_layer():
    high = {"max_violation": np.array([1.0, 4.5, 1.0])}
    other = {"max_violation": np.array([4.5, 1.0, 1.0])}
    short = {s: high for s in range(200, 249)}
    assert drive(change(healthy_metrics(8, 400), short))[0] == []
    turns = {s: high if s % 2 else other for s in range(200, 300)}
    assert drive(change(healthy_metrics(8, 400), turns))[0] == []  # no layer stays above
    # Between the two thresholds it neither fires nor clears.
    between = {s: {"max_violation": np.full(3, 3.5)} for s in range(260, 300)}
    events, actions = drive(change(healthy_metrics(8, 400), {s: high for s in range(200, 260)} | between | quiet(300, 401)))
    assert named(events) == [("alarm", "balance", 249), ("alarm_cleared", "balance", 315)] and actions == []
    assert events[0]["value"] == {"layers": [1], "max_violation": 4.5}
    assert events[0]["advice"] == "raise the balancing strength / check the router"


def quiet(first, last):
    return {s: {"max_violation": np.ones(3)} for s in range(first, last)}


def test_dead_experts_rising():
    def dead(step):
        return np.array([3, 3 + max(0, step - 300) // 20, 3])  # one more every 20 steps from step 300 on

    rng = np.random.default_rng(0)
    rising = {s: {"dead_experts": rng.poisson(dead(s) if s < 600 else np.full(3, 3))} for s in range(1, 901)}
    events, _ = drive(change(healthy_metrics(9, 900), rising))
    assert [event["event"] for event in events] == ["alarm", "alarm_cleared"]
    assert events[0]["alarm"] == "dead_experts" and events[0]["value"]["layers"] == [1] and 350 <= events[0]["step"] <= 450
    assert events[1]["step"] == 650


@pytest.mark.parametrize("seed", range(3))
def test_many_layers_of_dead_experts_scatter_without_alarm(seed):
    """92 layers over 10,000 steps: the lowest of 18,400 averages is far below the mean, by chance alone."""
    rng, trend = np.random.default_rng(seed), DeadTrend(50, 1.0)
    for _ in range(10_000):
        judged = trend.push(rng.poisson(2.0, 92).astype(float))
        assert judged is None or (judged[0] <= judged[1]).all()


def test_max_logit():
    values = {s: {"max_logit": np.array([[20.0, v]])} for s, v in [(100, 101), (101, 95), (102, 95), (103, 101)]}
    events, actions = drive(change(healthy_metrics(10, 200), values))
    assert named(events) == [("alarm", "max_logit", 100), ("alarm_cleared", "max_logit", 119)] and actions == []


def test_data_wait_over_a_window():
    slow = {"wall": {"seconds": 1.0, "data_wait": 0.5}}
    assert drive(change(healthy_metrics(11, 500), {s: slow for s in range(200, 240)}))[0] == []  # 40 of 128 steps: 17%
    events, actions = drive(change(healthy_metrics(11, 600), {s: slow for s in range(200, 300)}))
    assert [event["event"] for event in events] == ["alarm", "alarm_cleared"] and actions == []
    assert events[0]["value"] > 0.2 and events[1]["value"] < 0.1


def faulty_run():
    """Every alarm fires and clears in it."""
    up, nan = {"loss": lambda loss: loss + 3}, {"loss": np.nan, "skipped": 1}
    changes = {s: up for s in range(150, 154)} | {s: nan for s in range(200, 206)}
    changes |= {s: {"max_violation": np.full(3, 5.0), "wall": {"seconds": 1.0, "data_wait": 0.6}} for s in range(230, 300)}
    changes |= {s: {"grad_norm": 99.0, "max_logit": 200.0, "dead_experts": np.full(3, 40)} for s in range(310, 380)}
    changes |= {s: {"max_violation": np.ones(3), "dead_experts": np.full(3, 3)} for s in range(400, 601)}
    return change(healthy_metrics(12, 600), changes)


def test_resume_in_the_middle_of_a_window_decides_the_same():
    whole = Monitors()
    events, actions = drive(faulty_run(), whole)
    assert {event["alarm"] for event in events if event["event"] == "alarm"} == set(ADVICE)
    assert {event["alarm"] for event in events if event["event"] == "alarm_cleared"} == set(ADVICE)
    steps = list(faulty_run())
    monitors, resumed_events, resumed_actions = Monitors(), [], []
    for first, last in [(0, 17), (17, 151), (151, 203), (203, 260), (260, 261), (261, 333), (333, 600)]:
        state = json.loads(json.dumps(monitors.state(), allow_nan=False))
        monitors = Monitors()
        monitors.restore(state)
        more_events, more_actions = drive(steps[first:last], monitors, first + 1)
        resumed_events += more_events
        resumed_actions += more_actions
    assert resumed_events == events and resumed_actions == actions
    assert monitors.state() == whole.state()


def test_a_saved_state_is_a_copy():
    monitors = Monitors()
    drive(healthy_metrics(0, 70), monitors)
    saved = monitors.state()
    text = json.dumps(saved)
    drive(healthy_metrics(1, 70), monitors, 71)
    other = Monitors()
    other.restore(saved)
    drive(healthy_metrics(2, 70), other, 71)
    assert json.dumps(saved) == text


def test_after_a_rollback_the_windows_are_the_saved_ones():
    steps = list(healthy_metrics(13, 200))
    monitors = Monitors()
    drive(steps[:100], monitors)
    saved = monitors.state()
    up = [m | {"loss": m["loss"] + 4} for m in steps[100:110]]
    events, actions = drive(up, monitors, 101)
    assert actions == [(103, "rollback")] and not monitors.healthy
    cleared = monitors.rolled_back(100, saved)
    assert {event["alarm"] for event in cleared} == {event["alarm"] for event in events}
    assert all(event["event"] == "alarm_cleared" and event["by"] == "rollback" and event["step"] == 100 for event in cleared)
    assert monitors.healthy and monitors.state() == saved
    assert drive(up[:3], monitors, 101)[1] == [(103, "rollback")]  # the same again: it fires again
    nan = [m | {"loss": np.nan} for m in steps[:2]]
    drive(nan, monitors, 104)
    monitors.rolled_back(100, saved)
    assert monitors.skipped == 2  # the count of a run never goes back


def test_an_alarm_cleared_before_the_rollback_stays_cleared():
    steps = list(healthy_metrics(14, 200))
    steps[99] |= {"loss": steps[99]["loss"] + 4}
    monitors = Monitors()
    drive(steps[:100], monitors)
    saved = monitors.state()
    assert saved["alarms"]["loss_spike"]["active"]
    assert [e[0] for e in named(drive(steps[100:], monitors, 101)[0])] == ["alarm_cleared"]
    assert monitors.rolled_back(100, saved) == [] and monitors.healthy


def test_healthy_means_fit_to_be_known_good():
    monitors = Monitors()
    source = list(healthy_metrics(15, 120))
    drive(source, monitors)
    assert monitors.healthy
    monitors.observe(121, source[0] | {"skipped": 1})
    assert not monitors.healthy
    monitors.observe(122, source[-1])
    assert monitors.healthy


def test_a_new_stage_is_not_judged_by_the_last_ones_loss():
    """Harder data at a stage switch: 1.5 nats more for good."""
    later = [m | {"loss": m["loss"] + 1.5} for m in healthy_metrics(16, 600)][400:]
    monitors = Monitors()
    drive(list(healthy_metrics(16, 400)), monitors)
    kept = json.loads(json.dumps(monitors.state()))
    monitors.new_stage()
    assert drive(later, monitors, 401)[0] == []
    unaware = Monitors()
    unaware.restore(kept)
    assert drive(later, unaware, 401)[1] == [(403, "rollback")]


def test_nothing_is_judged_before_the_window_has_values():
    wild = [{"loss": 10.0**step, "grad_norm": 10.0**step, "skipped": 0} for step in range(32)]
    assert drive(wild)[0] == []


def test_runs_without_experts_or_times():
    plain = [{name: m[name] for name in ("loss", "grad_norm", "skipped")} for m in healthy_metrics(17, 200)]
    assert drive(plain) == ([], [])


def test_robust_z_is_a_z():
    window = np.random.default_rng(0).normal(3, 0.2, 100_000).tolist()
    assert robust_z(3.4, window, 1e-6) == pytest.approx(2.0, rel=0.02)
    assert robust_z(3.03, [3.0] * 50, 0.002) == pytest.approx(5.0)  # the floor: 0.006
    assert robust_z(0.0, [0.0] * 50, 0.002) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 1}, "window is 1; it must be an integer of at least 2"),
        ({"window": 16}, "window_min is 32; it must not exceed window, 16"),
        ({"clear_steps": 0}, "at least 1"),
        ({"skipped_limit": 2.5}, "must be an integer"),
        ({"spike_clear_z": 6.0}, "0 < spike_clear_z < spike_z must hold"),
        ({"violation": float("nan")}, "0 < violation_clear < violation must hold"),
        ({"data_wait": 1.2}, "below 1"),
        ({"spike_floor": 0.0}, "positive and finite"),
        ({"on_non_finite": "warn"}, "must be one of rollback, stop"),
        ({"on_divergence": "go"}, "must be one of warn, rollback, stop"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message):
        MonitorConfig(**change)


def test_bad_input():
    with pytest.raises(ValueError, match="step 3 lack grad_norm, skipped"):
        Monitors().observe(3, {"loss": 1.0})
    with pytest.raises(ValueError, match="layout 9"):
        Monitors().restore(Monitors().state() | {"version": 9})
    smaller = Monitors(MonitorConfig(window=64))
    monitors = Monitors()
    drive(healthy_metrics(0, 200), monitors)
    smaller.restore(monitors.state())
    assert smaller.state()["windows"]["loss"] == monitors.state()["windows"]["loss"][-64:]
    with pytest.raises(dataclasses.FrozenInstanceError):
        MonitorConfig().window = 3  # pyright: ignore[reportAttributeAccessIssue]
