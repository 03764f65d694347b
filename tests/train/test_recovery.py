"""Rollback: what is known good, where a run returns to, and when it gives up."""

import json

import pytest

from moejax.train.alarms import MonitorConfig, Monitors
from moejax.train.recovery import Recovery, Rollback, RolledBack, Stop, roll_back


def after(recovery, first, last, *, healthy=True, disk=(), snapshots=()):
    """Steps first..last with saves behind some; -> events."""
    events = []
    for step in range(first, last + 1):
        events += recovery.stepped(step, healthy)
        for tier, at in (("disk", disk), ("snapshot", snapshots)):
            if step in at:
                recovery.saved(step, tier)
    return events


def fresh(**settings):
    return Recovery(**{"promote_after": 10, "snapshot_after": 3, "max_rollbacks": 2} | settings)


def test_promotion_needs_healthy_steps_in_a_row():
    recovery = fresh()
    assert after(recovery, 1, 14, disk=(5,)) == [] and recovery.known_good is None
    assert recovery.stepped(15, True) == [{"event": "promoted", "step": 15, "checkpoint": 5}]
    assert recovery.known_good == 5
    assert after(recovery, 16, 25, disk=(20,)) == []
    assert recovery.stepped(26, False) == []  # five healthy steps behind it count no more
    assert after(recovery, 27, 35) == []
    assert recovery.stepped(36, True) == [{"event": "promoted", "step": 36, "checkpoint": 20}]


def test_the_newest_of_several_is_promoted_and_none_twice():
    recovery = fresh(promote_after=3)
    events = after(recovery, 1, 12, disk=(2, 3, 8))
    assert [(event["step"], event["checkpoint"]) for event in events] == [(5, 2), (6, 3), (11, 8)]
    assert recovery.known_good == 8


def test_without_a_known_good_state_the_run_stops():
    recovery = fresh()
    after(recovery, 1, 9, disk=(5,))
    stop = recovery.decide(10, "non_finite: 5 updates skipped in a row (step 10)")
    assert isinstance(stop, Stop) and "no checkpoint has been followed by 10 healthy steps yet" in stop.reason
    text = "\n".join(stop.report())
    assert "lower the learning rate" in text and "promote earlier" in text


def test_the_newer_healthy_copy_is_the_target():
    recovery = fresh()
    after(recovery, 1, 30, disk=(10, 20), snapshots=(25,))
    assert recovery.known_good == 20
    assert recovery.decide(31, "x") == Rollback("snapshot", 25, 31, "x")
    assert recovery.decide(31, "x").lost_steps == 6  # pyright: ignore[reportAttributeAccessIssue]
    recovery.removed(25, "snapshot")
    recovery.saved(30, "snapshot")  # not proved yet
    assert recovery.decide(31, "x") == Rollback("disk", 20, 31, "x")
    older = fresh()
    after(older, 1, 40, disk=(20,), snapshots=(12,))
    assert older.decide(41, "x") == Rollback("disk", 20, 41, "x")


@pytest.mark.parametrize("sick", [24, 25, 26, 28])
def test_a_snapshot_near_trouble_is_not_healthy(sick):
    """Taken at an unhealthy step, or fewer than 3 healthy steps before one."""
    recovery = fresh()
    for step in range(1, 30):
        recovery.stepped(step, step != sick)
        if step == 10:
            recovery.saved(step, "disk")
        if step == 25:
            recovery.saved(step, "snapshot")
    target = recovery.decide(30, "x")
    assert isinstance(target, Rollback)
    assert target.tier == ("snapshot" if sick in (24,) else "disk")


def test_a_snapshot_is_used_once_then_the_disk():
    recovery = fresh()
    after(recovery, 1, 30, disk=(10,), snapshots=(20,))
    first = recovery.decide(31, "x")
    assert first == Rollback("snapshot", 20, 31, "x")
    recovery.carried_out(first)
    recovery.stepped(21, False)  # at once again
    assert recovery.decide(22, "x") == Rollback("disk", 10, 22, "x")


def test_what_the_given_up_course_saved_is_discarded():
    recovery = fresh()
    after(recovery, 1, 30, disk=(10, 22, 26), snapshots=(24,))
    assert recovery.known_good == 10
    recovery.removed(24, "snapshot")
    decision = recovery.decide(31, "x")
    assert decision == Rollback("disk", 10, 31, "x", discard=(22, 26))
    recovery.carried_out(decision)
    assert after(recovery, 11, 21) == []  # 22 and 26 are never promoted
    assert recovery.known_good == 10 and recovery.state()["disk"] == [[10, 10]]
    with pytest.raises(ValueError, match="known-good checkpoint of step 10 was deleted"):
        recovery.removed(10, "disk")
    recovery.saved(22, "disk")  # the new course saves at the same step
    recovery.removed(22, "disk")


def test_the_cap_ends_the_run_with_a_report():
    recovery = fresh()
    after(recovery, 1, 30, disk=(10,))
    for failed in (31, 33):
        decision = recovery.decide(failed, "loss_divergence: three steps")
        assert isinstance(decision, Rollback)
        event = recovery.carried_out(decision)
        assert event["to"] == 10 and event["lost_steps"] == failed - 10
    stop = recovery.decide(35, "loss_divergence: three steps")
    assert isinstance(stop, Stop) and "2 rollbacks without progress beyond step 33" in stop.reason
    assert [event["step"] for event in stop.events] == [31, 33]
    text = "\n".join(stop.report())
    assert "rolled back from step 33 to 10 (disk), 23 steps lost" in text
    assert "lower the learning rate" in text and "batches of steps 10 to 33" in text and "checkpoint of step 10" in text
    assert isinstance(fresh(max_rollbacks=0).decide(1, "x"), Stop)


def test_progress_beyond_the_failure_gives_the_rollbacks_back():
    recovery = fresh()
    after(recovery, 1, 30, disk=(10,))
    for failed in (31, 28):
        recovery.carried_out(recovery.decide(failed, "x"))  # pyright: ignore[reportArgumentType]
    after(recovery, 11, 35, disk=(20,))  # promoted, but it lies before the failure
    assert recovery.known_good == 20 and recovery.rollbacks == 2
    after(recovery, 36, 50, disk=(38,))
    assert recovery.known_good == 38 and recovery.rollbacks == 0


def test_resumed_decisions_are_the_same():
    """At every step: the state goes through JSON into a new process, and all later answers agree (without snapshots)."""

    def course(recovery, step):
        events = recovery.stepped(step, step not in (27, 28))
        if step % 6 == 0:
            recovery.saved(step, "disk")
        if step == 29:
            decision = recovery.decide(step, "x")
            events.append(decision)
            events.append(recovery.carried_out(decision))
        return events

    whole, expected = fresh(promote_after=8), []
    expected = [course(whole, step) for step in range(1, 60)]
    for cut in (5, 6, 14, 27, 29, 45):
        first, got = fresh(promote_after=8), []
        got = [course(first, step) for step in range(1, cut + 1)]
        state = json.loads(json.dumps(first.state(), allow_nan=False))
        second = fresh(promote_after=8)
        second.restore(state, on_disk=[step for step, _ in state["disk"]])
        got += [course(second, step) for step in range(cut + 1, 60)]
        assert got == expected and second.state() == whole.state()


def test_the_disk_has_the_last_word_on_resume():
    recovery = fresh()
    after(recovery, 1, 30, disk=(10, 20))
    state = recovery.state()
    resumed = fresh()
    resumed.restore(state, on_disk=[10, 30])  # 20 is gone; 30 was written by the save that holds this very state
    assert resumed.known_good is None and resumed.state()["disk"] == [[10, 10], [30, 0]]
    assert resumed.stepped(31, True) == [{"event": "promoted", "step": 31, "checkpoint": 10}]
    newer = fresh()
    newer.restore(state, on_disk=[10, 20, 30], known_good=30)  # promoted after that state was written
    assert newer.known_good == 30
    newer.restore(state, on_disk=[10, 20], known_good=30)
    assert newer.known_good == 20
    with pytest.raises(ValueError, match="layout 7"):
        resumed.restore(state | {"version": 7}, on_disk=[])


class Fakes:
    """What roll_back is given; notes each call."""

    def __init__(self, *, snapshot_fails=False, disk_fails=False):
        self.calls, self.events = [], []
        self.fails = {"snapshot": snapshot_fails, "disk": disk_fails}

    def restore(self, tier):
        def from_tier(step):
            self.calls.append((tier, step))
            if self.fails[tier]:
                raise OSError(f"no {tier}")
            return f"{tier} {step}", {"step": step}

        return from_tier

    def go(self, recovery, step, reason="loss_divergence: x"):
        return roll_back(
            recovery,
            step,
            reason,
            restore_snapshot=self.restore("snapshot"),
            restore_disk=self.restore("disk"),
            discard=lambda step: self.calls.append(("discard", step)),
            record=self.events.append,
        )


def prepared():
    recovery = fresh()
    after(recovery, 1, 30, disk=(10, 28), snapshots=(20,))
    return recovery


def test_the_driver_restores_discards_and_records():
    fakes = Fakes()
    result = fakes.go(prepared(), 31)
    assert isinstance(result, RolledBack)
    assert (result.state, result.metadata, result.decision.step) == ("snapshot 20", {"step": 20}, 20)
    assert fakes.calls == [("snapshot", 20), ("discard", 28)]
    (event,) = fakes.events
    assert (event["event"], event["step"], event["to"], event["tier"], event["discarded"]) == ("rollback", 31, 20, "snapshot", [28])
    assert json.loads(json.dumps(event, allow_nan=False)) == event


def test_a_failing_snapshot_falls_to_disk_and_says_so():
    fakes = Fakes(snapshot_fails=True)
    recovery = prepared()
    result = fakes.go(recovery, 31)
    assert isinstance(result, RolledBack) and result.state == "disk 10"
    assert fakes.calls == [("snapshot", 20), ("disk", 10), ("discard", 28)]
    assert fakes.events[0]["snapshot_error"] == "OSError: no snapshot" and fakes.events[0]["tier"] == "disk"
    assert recovery.rollbacks == 1


def test_a_failing_disk_raises_and_deletes_nothing():
    fakes, recovery = Fakes(snapshot_fails=True, disk_fails=True), prepared()
    with pytest.raises(OSError, match="no disk"):
        fakes.go(recovery, 31)
    assert ("discard", 28) not in fakes.calls and recovery.rollbacks == 0 and fakes.events == []
    lone = fresh()
    after(lone, 1, 30, snapshots=(20,))
    assert isinstance(Fakes(snapshot_fails=True).go(lone, 31), Stop)


def test_the_driver_stops_with_a_report():
    fakes = Fakes()
    result = fakes.go(fresh(max_rollbacks=0), 5)
    assert isinstance(result, Stop) and fakes.calls == []
    assert fakes.events[0]["event"] == "stopped" and fakes.events[0]["report"] == result.report()


def test_a_poisoned_window_is_passed_by_a_rollback():
    """Monitors and recovery together on a run whose batches 60..64 are poison: one rollback, data never rewound, then to the end."""
    monitors, recovery = Monitors(MonitorConfig(window_min=16)), Recovery(promote_after=20, snapshot_after=5)
    fakes, saved, seen = Fakes(), {}, []
    step = batch = 0
    while step < 120:
        step, batch = step + 1, batch + 1
        seen.append(batch)
        loss = 3.0 + 0.05 * ((batch * 7919) % 13 - 6) / 6 + (5.0 if 60 <= batch < 65 else 0)
        verdict = monitors.observe(step, {"loss": loss, "grad_norm": 1.0, "skipped": 0})
        for event in recovery.stepped(step, monitors.healthy):
            fakes.events.append(event)
        if verdict.action == "rollback":
            result = fakes.go(recovery, step, verdict.reason)
            assert isinstance(result, RolledBack)
            step = result.decision.step
            fakes.events += monitors.rolled_back(step, saved[step])
        elif step % 25 == 0:
            saved[step] = json.loads(json.dumps(monitors.state()))
            recovery.saved(step, "disk")
    assert seen == list(range(1, len(seen) + 1))  # every batch once
    rollbacks = [event for event in fakes.events if event["event"] == "rollback"]
    # Batch 62 is the third bad one; 25 was promoted at 45, and after the return batches 63 and 64 count as spikes but are not three.
    assert [(event["step"], event["to"]) for event in rollbacks] == [(62, 25)]
    assert monitors.healthy and recovery.known_good == 100 and recovery.rollbacks == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_rollbacks": -1}, "at least 0"), ({"promote_after": 0}, "at least 1"), ({"snapshot_after": 1.5}, "must be an integer")],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Recovery(**settings)
