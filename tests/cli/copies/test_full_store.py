"""Several models copied into a store that they fill."""

from __future__ import annotations

from pathlib import Path

from support.processes.cli_world import put, run

from kvtier.testing.subject import NAMESPACE, make_keys
from kvtier.types import Namespace

BLOCKS = 20
RECORD = 12288
OTHERS = [Namespace(facts={"model": str(n)}, group_bytes=NAMESPACE.group_bytes) for n in range(99)]
FIRST = next(each for each in OTHERS if each.id < NAMESPACE.id)  # also if both are as new


def with_store(stack: Path, capacity: int) -> Path:
    lines = [line for line in stack.read_text().splitlines() if "nvme" not in line]
    url = (stack.parent / "store").as_uri()
    lines.append(f"  - {{kind: object, url: '{url}', capacity: {capacity}, codec: none}}")
    stack.write_text("\n".join(lines))
    return stack


def test_what_was_there_of_the_first_makes_no_room_for_the_second(
    stack_file: Path, fresh: Path
) -> None:
    """Though it is the oldest there. What nobody asked for goes."""
    source = with_store(stack_file, 64 << 20)
    for namespace in (NAMESPACE, FIRST):
        put(source, make_keys(BLOCKS), namespace)
    target = with_store(fresh, (2 * BLOCKS + 3) * RECORD)
    for start in (0, 100):
        put(target, make_keys(BLOCKS, start=start), FIRST)
    words = ["prewarm", "-c", target, "--from", source, "--into", "object"]
    done = run(*words)["namespaces"]
    found = [(each["namespace"], each["already_there"], each["copied"]) for each in done]
    assert found == [(FIRST.id, BLOCKS, 0), (NAMESPACE.id, 0, BLOCKS)]
    assert [each["already_there"] for each in run(*words)["namespaces"]] == [BLOCKS] * 2
