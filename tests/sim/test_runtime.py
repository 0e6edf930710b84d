"""The simulated runtime: order, pauses, crashes, clocks."""

from __future__ import annotations

import random

import pytest

from chaos.sim.disk import SimDisk
from chaos.sim.runtime import Livelock, SimRuntime, SimWorld


def test_events_run_in_time_order_and_first_come_first_served():
    world, seen = SimWorld(1), []
    runtime = SimRuntime(world, "n1")
    runtime.call_later(0.2, seen.append, "late")
    runtime.call_soon(seen.append, "a")
    runtime.call_soon(seen.append, "b")
    runtime.call_later(0.1, seen.append, "never").cancel()
    world.run_for(1.0)
    assert seen == ["a", "b", "late"]
    assert world.now == 1.0


def test_a_paused_node_does_everything_later_in_order():
    world, seen = SimWorld(1), []
    runtime = SimRuntime(world, "n1")
    runtime.call_later(0.1, seen.append, 1)
    runtime.call_later(0.2, seen.append, 2)
    runtime.pause()
    world.run_for(1.0)
    assert seen == []
    runtime.resume()
    world.run_for(0.0)
    assert seen == [1, 2]


def test_a_crashed_node_does_nothing_more():
    world, seen = SimWorld(1), []
    runtime = SimRuntime(world, "n1", SimDisk(random.Random(1)))
    runtime.in_thread("x", lambda: seen.append("ran"), lambda result, error: seen.append("done"))
    runtime.crash()
    world.run_for(1.0)
    assert seen == []


def test_a_crash_at_an_io_step_reaches_the_world():
    world, crashed = SimWorld(1), []
    world.on_crash = crashed.append
    disk = SimDisk(random.Random(1))
    runtime = SimRuntime(world, "n1", disk)
    disk.crash_in = 1
    runtime.call_soon(lambda: disk.makedirs("/a"))
    world.run_for(1.0)
    assert crashed == [runtime]


def test_jobs_of_one_lane_keep_their_order_and_errors_are_handed_over():
    world, seen = SimWorld(1), []
    runtime = SimRuntime(world, "n1")
    runtime.in_thread("x", lambda: 1, lambda result, error: seen.append(result))
    runtime.in_thread("x", lambda: 1 // 0, lambda result, error: seen.append(type(error)))
    world.run_for(1.0)
    assert seen == [1, ZeroDivisionError]


def test_a_brief_job_on_the_loop_holds_up_everything_else_of_its_node():
    world, seen = SimWorld(1), []
    disk = SimDisk(random.Random(1))
    runtime = SimRuntime(world, "n1", disk, brief=True)
    disk.makedirs("/a")
    file = disk.open("/a/x", create=True)

    def sync() -> None:
        runtime.in_thread("journal", file.sync, lambda result, error: seen.append("synced"), brief=True)

    for _ in range(8):
        sync()
        world.run_for(0.1)
    seen.clear()
    disk.sync_delay_s = 1.0
    sync()
    runtime.call_later(0.1, seen.append, "timer")
    world.run_for(0.4)
    assert seen == []
    world.run_for(2.0)
    assert seen == ["synced", "timer"]
    # That was too slow: the lane is back in its thread.
    sync()
    runtime.call_later(0.1, seen.append, "another")
    world.run_for(0.4)
    assert seen == ["synced", "timer", "another"]
    assert len(runtime.stalls) == 1


def test_clocks_drift_and_step_but_monotonic_never_steps():
    world = SimWorld(1)
    runtime = SimRuntime(world, "n1", drift=0.001, wall_offset_ms=500)
    start = runtime.monotonic()
    assert runtime.wall_ms() == world.wall_ms() + 500
    world.run_for(100.0)
    assert runtime.monotonic() - start == pytest.approx(100.1)
    runtime.step_wall(-3_600_000)
    # NTP keeps wall clocks from drifting away.
    assert runtime.wall_ms() == world.wall_ms() + 500 - 3_600_000
    assert runtime.monotonic() - start == pytest.approx(100.1)


def test_a_loop_that_never_sleeps_is_found():
    world = SimWorld(1)
    runtime = SimRuntime(world, "n1")

    def again() -> None:
        runtime.call_soon(again)

    runtime.call_soon(again)
    with pytest.raises(Livelock):
        world.run_for(1.0)
