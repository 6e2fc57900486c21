"""Stacks with an object tier: cascade, one-hop loads, prewarming of a machine that has nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.object.object_servers import SECRET_KEY, ServerProcess

from kvtier import Stack
from kvtier.record.record import record_bytes
from kvtier.testing.subject import NAMESPACE, make_keys, payload
from kvtier.types import BlockKey, Presence

SLOT = record_bytes(NAMESPACE.payload_bytes)


def stack_of(folder: Path, url: str, *, mode: str, nvme: bool, **more: Any) -> dict[str, Any]:
    (folder / "host").mkdir(parents=True, exist_ok=True)
    tiers: list[dict[str, Any]] = [
        {"kind": "cpu", "path": str(folder / "host"), "capacity": 8 * (SLOT + 64) + 12288}
    ]
    if nvme:
        path = str(folder / "nvme")
        tiers.append({"kind": "nvme", "path": path, "capacity": "4MiB", "free_floor": 0})
    tiers.append({"kind": "object", "url": url, "capacity": "64MiB", **more})
    return {"version": 1, "name": "unit", "mover": {"mode": mode}, "tiers": tiers}


def blocks(count: int, start: int = 0) -> dict[BlockKey, bytes]:
    return {key: payload(key) for key in make_keys(count, start=start)}


def fill_here_and_read_there(here: dict[str, Any], there: dict[str, Any]) -> None:
    wanted = blocks(24)
    with Stack.open(here, NAMESPACE) as stack:
        stack.chain.tiers[-1].refresh()  # until a caretaker is elected, who gives it room
        for start in range(0, 24, 4):
            assert len(stack.store(blocks(4, start))) == 4
            assert stack.settle()
        assert stack.load(list(wanted)) == wanted
    with Stack.open(there, NAMESPACE) as stack:
        assert stack.load(list(wanted)) == wanted
        assert stack.chain.chain_stats().hits[-1] == 24


@pytest.mark.parametrize(
    "nvme",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["cpu-object", "cpu-nvme-object"],
)
@pytest.mark.parametrize("mode", ["threads", "process"])
def test_another_machine_starts_warm_from_a_folder(tmp_path: Path, nvme: bool, mode: str) -> None:
    url = f"file://{tmp_path}/shared"
    fill_here_and_read_there(
        stack_of(tmp_path / "here", url, mode=mode, nvme=nvme),
        stack_of(tmp_path / "there", url, mode=mode, nvme=nvme),
    )


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize("mode", ["threads", "process"])
@pytest.mark.parametrize(("cloud", "server"), [("s3", "rclone"), ("az", "azurite")])
def test_another_machine_starts_warm_from_a_bucket(
    tmp_path: Path, request: pytest.FixtureRequest, cloud: str, server: str, mode: str
) -> None:
    process: ServerProcess = request.getfixturevalue(f"{server}_server")
    url = f"{cloud}://bucket/stack-{mode}"
    more = {"endpoint": process.endpoint, "codec": "split-zstd"}
    fill_here_and_read_there(
        stack_of(tmp_path / "here", url, mode=mode, nvme=True, **more),
        stack_of(tmp_path / "there", url, mode=mode, nvme=False, **more),
    )


@pytest.mark.s3
def test_a_dead_bucket_leaves_the_rest_serving(
    tmp_path: Path, own_rclone: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"endpoint": own_rclone.endpoint, "load_deadline": "1s", "store_deadline": "1s"}
    config = stack_of(tmp_path, "s3://bucket/p", mode="threads", nvme=True, **more)
    wanted = blocks(16)
    with Stack.open(config, NAMESPACE) as stack:
        own_rclone.kill()
        for start in range(0, 16, 4):
            assert len(stack.store(blocks(4, start))) == 4
            assert stack.settle()
        assert stack.load(list(wanted)) == wanted
    with Stack.open(config, NAMESPACE) as stack:  # opens without it, too
        assert stack.load(list(wanted)) == wanted
    assert "object store" in caplog.text
    assert SECRET_KEY not in caplog.text


@pytest.mark.slow
@pytest.mark.s3
def test_what_was_stored_while_a_bucket_was_dead_comes_there_when_it_is_used(
    tmp_path: Path, own_rclone: ServerProcess
) -> None:
    more = {"endpoint": own_rclone.endpoint, "store_deadline": "2s"}
    here = stack_of(tmp_path / "here", "s3://bucket/p", mode="process", nvme=True, **more)
    there = stack_of(tmp_path / "there", "s3://bucket/p", mode="threads", nvme=False, **more)
    wanted = blocks(4)
    with Stack.open(here, NAMESPACE) as stack:
        own_rclone.kill()
        assert len(stack.store(wanted)) == 4
        assert stack.settle()
        assert stack.chain.tiers[-1].lookup(list(wanted)) == [Presence.MISS] * 4
        stack.chain._context.stores._rest = 0.0  # as if half a minute went by
        own_rclone.start()
        for _ in range(200):
            assert stack.load(list(wanted)) == wanted
            assert stack.settle()
            if stack.chain.tiers[-1].lookup(list(wanted)) == [Presence.HIT] * 4:
                break
            threading.Event().wait(0.05)  # the circuit lets a trial through after a second
    with Stack.open(there, NAMESPACE) as stack:
        assert stack.load(list(wanted)) == wanted


@pytest.mark.slow
@pytest.mark.s3
def test_a_dead_bucket_is_told_of_though_nobody_asks_it_for_anything(
    tmp_path: Path, own_rclone: ServerProcess
) -> None:
    """Whose claim has lapsed has no room there, and so no store fails that could tell."""
    more = {"endpoint": own_rclone.endpoint, "refresh": "100ms"}
    config = stack_of(tmp_path, "s3://bucket/p", mode="threads", nvme=False, **more)
    with Stack.open(config, NAMESPACE) as stack:
        for act, down in ((own_rclone.kill, True), (own_rclone.start, False)):
            assert stack.chain.chain_stats().down == [False, not down]
            act()
            while stack.chain.chain_stats().down[-1] is not down:
                stack.chain.poll()
                time.sleep(0.01)


@pytest.mark.s3
def test_a_bucket_that_comes_back_is_asked_again_at_once(
    tmp_path: Path,
    own_rclone: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What has failed again and again rests, for a quarter of an hour in the end; but not when it
    is known to be well."""
    more = {"endpoint": own_rclone.endpoint, "refresh": "100ms", "store_deadline": "1s"}
    config = stack_of(tmp_path, "s3://bucket/p", mode="threads", nvme=False, **more)
    with Stack.open(config, NAMESPACE) as stack:
        stack.chain.tiers[-1].refresh()  # until a caretaker is elected, who gives it room
        own_rclone.kill()
        start = 0
        while not stack.chain.chain_stats().down[-1]:
            stack.store(blocks(4, start))
            assert stack.settle()
            start += 4
        now = time.monotonic()
        monkeypatch.setattr(stack.chain, "_clock", lambda: now)  # no rest ends by itself
        while caplog.text.count("object store unwell") < 2:  # to the keeper as to the mover
            time.sleep(0.01)
        own_rclone.start()
        while stack.chain.chain_stats().down[-1]:
            stack.chain.poll()
            time.sleep(0.01)
