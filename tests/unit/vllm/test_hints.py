"""What is said about the use of blocks: how it is read, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler.asking import (
    CHUNK,
    FULL,
    STATE,
    WINDOW,
    Asking,
    manager,
    on_disk,
)

from kvtier import Stack
from kvtier.chain.hits import Shape
from kvtier.types import BlockKey, Presence
from kvtier.vllm.hints import (
    ACTIONS_MAX,
    AWAITED_S,
    BEGINS_S,
    DIRECTIVES_MAX,
    PREFETCHES_MAX,
    Action,
    HintParser,
    LetGo,
    Prefetch,
    Release,
    Retain,
)
from kvtier.vllm.hooks.scheduler import hints_of
from kvtier.vllm.protocol import Report


def action(type: str, payload: dict[str, Any] | None = None, version: str = "1.0") -> Action:
    return Action(type, version, payload or {})


def read(parameters: object = None, *actions: Action) -> list[Any]:
    understanding = HintParser()
    found = understanding.parse(parameters, actions)
    assert understanding.ignored == {"unknown": 0, "malformed": 0}
    return found


@pytest.mark.parametrize(
    ("parameters", "wishes"),
    [
        (None, []),
        ({"do_remote_prefill": True, "remote_port": 5}, []),
        ({"retain_s": 60}, [Retain("", 60.0)]),
        ({"session": "s"}, [Retain("s")]),
        ({"session": "s", "retain_s": 1.5}, [Retain("s", 1.5)]),
        ({"session": "s", "release": True, "retain_s": 9}, [Release("s")]),
        ({"session": "s", "prefetch": True}, [Prefetch("s"), Retain("s")]),
    ],
)
def test_transfer_parameters(parameters: object, wishes: list[Any]) -> None:
    assert read(parameters) == wishes


def test_the_actions_of_others() -> None:
    ranges = [
        {"start": 0, "end": 512, "priority": 90, "duration": 3600.0},
        {"start": 512, "end": None, "priority": 40},
        {"covers_output": True, "priority": 10, "duration": 5},
    ]
    assert read(None, action("kv.retain", {"scope": "s", "directives": ranges})) == [
        Retain("s", 3600.0, 0, 512),
        Retain("s", None, 512, None),
        Retain("s", 5.0, 0, None),
    ]
    let_go = {"scope": "s", "directives": [{"start": 8, "end": 16, "priority": 0}]}
    assert read(None, action("kv.retain", let_go)) == [LetGo("s", 8, 16)]
    routers = {"priority": 3, "ttl_seconds": 30, "block_hashes": [1], "execute_at": "x"}
    assert read(None, action("kv.retain", routers, "1.3")) == [Retain("", 30.0)]
    for name in ("kv.release", "kv.evict", "kv.deref"):
        assert read(None, action(name, {"session_id": "s"})) == [Release("s")]
    assert read(None, action("kv.evict", {"include_current_request": False})) == [
        Release("", own=False)
    ]
    assert read(None, action("kv.prefetch", {"session_id": "s"}), action("kv.prefetch")) == [
        Prefetch("s"),
        Prefetch(""),
    ]


def test_what_comes_with_a_request() -> None:
    sent = SimpleNamespace(action_type="kv.deref", action_version="1.0", payload={})
    hints = SimpleNamespace(actions=[sent])
    for each, actions in ((None, []), (hints, [action("kv.deref")])):
        request = SimpleNamespace(kv_transfer_params=None, kv_hints=each)
        assert hints_of(request) == (None, actions)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (action("kv.fetch", {"block_hashes": [1]}), "unknown"),
        (action("kv.retain", {"ttl_seconds": 5}, "2.0"), "unknown"),
        (action("kv.retain", {"ttl_seconds": 5}, ""), "unknown"),
        (action("kv.retain"), "malformed"),
        (action("kv.retain", {"ttl_seconds": math.inf}), "malformed"),
        (action("kv.retain", {"ttl_seconds": -1}), "malformed"),
        (action("kv.retain", {"ttl_seconds": True}), "malformed"),
        (action("kv.retain", {"ttl_seconds": 1, "scope": "kvtier:pin"}), "malformed"),
        (action("kv.retain", {"ttl_seconds": 1, "include_current_request": False}), "malformed"),
        (action("kv.retain", {"directives": [{"priority": 1, "more": 1}]}), "malformed"),
        (action("kv.retain", {"directives": [{"priority": 101}]}), "malformed"),
        (action("kv.retain", {"directives": [{"priority": 1, "end": 0}]}), "malformed"),
        (
            action("kv.retain", {"directives": [{"priority": 1}] * (DIRECTIVES_MAX + 1)}),
            "malformed",
        ),
        (action("kv.release", {"session_id": "x" * 200}), "malformed"),
        (Action("kv.release", "1.0", "not a mapping"), "malformed"),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_understood_is_counted_and_logged_once(
    said: Action, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    understanding = HintParser()
    for _ in range(3):
        wishes = understanding.parse({"retain_s": 5}, [said, action("kv.deref")])
        assert wishes == [Retain("", 5.0), Release("")], "the others are heeded"
    assert understanding.ignored[kind] == 3
    assert sum(understanding.ignored.values()) == 3
    assert len(caplog.records) == 1


@pytest.mark.parametrize("bad", [{"retain_s": "x"}, {"session": 3}, {"session": "kvtier:pin"}])
def test_transfer_parameters_that_are_wrong(bad: object) -> None:
    understanding = HintParser()
    assert understanding.parse(bad, []) == []
    assert understanding.ignored["malformed"] == 1


def test_an_envelope_without_end_is_read_in_part() -> None:
    understanding = HintParser()
    assert len(understanding.parse(None, [action("kv.deref")] * 10_000)) == ACTIONS_MAX
    assert understanding.ignored["malformed"] == 1


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
)
names = st.sampled_from(["scope", "session_id", "directives", "ttl_seconds", "priority", "x"])


@pytest.mark.slow
@given(
    parameters=st.dictionaries(
        st.sampled_from(["session", "retain_s", "release", "prefetch"]), json
    ),
    type=st.sampled_from(["kv.retain", "kv.prefetch", "kv.release"]),
    payload=st.dictionaries(names, json),
)
def test_whatever_is_sent_raises_nothing(parameters: Any, type: str, payload: Any) -> None:
    HintParser().parse(parameters, [action(type, payload)])


@pytest.fixture
def opened(open_stack: Callable[..., Stack]) -> Callable[..., Stack]:
    """By default nothing goes down, so that what host memory does not retain is gone."""
    more = {"write": "never", "eviction": "lru", "retain": {"share": 0.5}}
    return lambda **other: open_stack(33, **(more | other))


def serve(asking: Asking, request: str, ends: dict[bytes, int], **said: Any) -> None:
    """A request that is computed and stored, and says something about its blocks."""
    served = asking.manager
    served.on_new_request(request)
    served.hints.said(request, said.get("parameters"), said.get("actions", ()))
    asking.hit(request, ends, max(ends.values()) + 1)
    served.mark_used(request, ends)
    _, worker_job = served.prepare_store(list(ends), request)
    served.report(worker_job.number, Report(1, reads_files=False))
    served.hints.ended(request, ends, said.get("prompt", 1 << 40))
    served.on_request_finished(request)
    served.on_schedule_end()


def flood(asking: Asking, prompts: int = 8) -> None:
    for number in range(prompts):
        serve(asking, f"flood {number}", asking.keys(8, first=1000 + 8 * number))


def here(stack: Stack, ends: dict[bytes, int], tier: int = 0) -> int:
    found = stack.chain.tiers[tier].lookup([BlockKey(key) for key in ends])
    return found.count(Presence.HIT)


@pytest.mark.parametrize("shapes", [(FULL,), (FULL, WINDOW), (FULL, STATE)])
def test_what_is_retained_outlives_a_flood(
    opened: Callable[..., Stack], shapes: tuple[Shape, ...]
) -> None:
    stack = opened()
    asking = manager(stack, *shapes)
    kept, other = asking.keys(4), asking.keys(4, first=4)
    serve(asking, "kept", kept, parameters={"session": "s", "retain_s": 100})
    serve(asking, "other", other)
    flood(asking)
    needed = {key: kept[key] for key in asking.needed(kept)}
    assert here(stack, needed) == len(needed)
    assert here(stack, other) == 0
    assert stack.chain.tiers[0].stats().retained > 0


def test_a_range_of_tokens_is_retained(opened: Callable[..., Stack]) -> None:
    stack = opened()
    asking = manager(stack, FULL)
    ends = asking.keys(6)
    directives = [{"start": 0, "end": 2 * CHUNK + 1, "priority": 1, "duration": 50}]
    said = action("kv.retain", {"scope": "s", "directives": directives})
    serve(asking, "a", ends, actions=[said])
    assert stack.chain.retention.blocks_of("s") == list(ends)[:2]
    let_go = [{"start": CHUNK, "end": 2 * CHUNK, "priority": 0}]
    serve(asking, "b", ends, actions=[action("kv.retain", {"scope": "s", "directives": let_go})])
    assert stack.chain.retention.blocks_of("s") == list(ends)[:1]


def test_what_was_generated_and_not_stored_takes_no_place(opened: Callable[..., Stack]) -> None:
    stack = opened()
    asking = manager(stack, FULL)
    ends = asking.keys(6)
    stored = dict(list(ends.items())[:3])
    serve(asking, "stores", stored)
    asking.manager.on_new_request("a")
    asking.manager.hints.said("a", {"session": "s"}, ())
    asking.manager.hints.ended("a", ends, 2 * CHUNK)
    assert stack.chain.retention.blocks_of("s") == list(stored)


def test_a_session_that_is_over_goes_first(opened: Callable[..., Stack]) -> None:
    stack = opened()
    asking = manager(stack, FULL)
    shared, mine = asking.keys(2), asking.keys(6)
    serve(asking, "other", shared, parameters={"session": "t"})
    serve(asking, "a", mine, parameters={"session": "s"})
    serve(asking, "later", asking.keys(6, first=50))
    serve(asking, "end", mine, parameters={"session": "s", "release": True})
    victims = stack.chain.tiers[0].victims(4)
    assert victims == list(mine)[:1:-1], "its own, but for what the other session retains"
    assert stack.chain.tiers[0].stats().released == 4


def test_after_a_reset_nothing_is_retained(opened: Callable[..., Stack]) -> None:
    stack = opened()
    asking = manager(stack, FULL)
    serve(asking, "a", asking.keys(4), parameters={"session": "s"})
    asking.manager.on_new_request("b")
    asking.manager.hints.said("b", {"session": "s"}, ())
    asking.manager.reset()
    asking.manager.hints.ended("b", asking.keys(4), 4 * CHUNK)
    assert stack.chain.tiers[0].stats().retained == 0
    assert not asking.manager.hints._actions


def test_the_next_process_retains_the_same(opened: Callable[..., Stack]) -> None:
    stack = opened()
    asking = manager(stack, FULL)
    kept = asking.keys(4)
    serve(asking, "kept", kept, parameters={"session": "s"})
    stack.close()
    stack = opened()
    asking = manager(stack, FULL)
    assert stack.chain.retention.blocks_of("s") == list(kept)
    flood(asking)
    assert here(stack, kept) == 4
    serve(asking, "end", kept, parameters={"session": "s", "release": True})
    assert stack.chain.tiers[0].stats().retained == 0


def test_what_a_session_will_ask_for_comes_up(opened: Callable[..., Stack]) -> None:
    stack = opened(write="through")
    asking = manager(stack, FULL)
    served = asking.manager
    ends = asking.keys(6)
    on_disk(stack, ends)
    stack.chain.retention.retain([BlockKey(key) for key in ends], "s", 1000.0)
    serve(asking, "hint", asking.keys(1, first=70), parameters={"session": "s", "prefetch": True})
    assert served.hints.pending or here(stack, ends) or stack.chain.has_pending_work
    assert stack.settle()
    served.on_schedule_end()
    assert here(stack, ends) == 6
    serve(asking, "next", ends, parameters={"session": "s"})
    served.on_schedule_end()
    assert served.hints._early == {}


def test_prefetches_for_sessions_end(opened: Callable[..., Stack]) -> None:
    stack = opened()
    asking = manager(stack, FULL)
    served, now = asking.manager, [100.0]
    served.hints._clock = lambda: now[0]
    for number in range(PREFETCHES_MAX + 5):
        ends = asking.keys(1, first=number)
        said = {"session": f"s{number % 8}", "prefetch": True}
        serve(asking, f"r{number}", ends, parameters=said)
    assert len(served.hints._early) <= PREFETCHES_MAX
    now[0] += BEGINS_S
    assert not (served.hints.pending and not stack.chain.retention.unwritten)
    now[0] += AWAITED_S + 1.0
    served.on_schedule_end()
    served.on_schedule_end()
    assert served.hints._early == {}
    assert not stack.chain.prefetches._requests
