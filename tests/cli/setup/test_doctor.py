"""`kvtier doctor`: what it finds on machines and stacks of different kinds."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.processes.cli_world import command

from kvtier.backends.cpu import inspect as cpu_inspect
from kvtier.backends.object.inspection import checks as check_store
from kvtier.backends.object.stores import bucket_store
from kvtier.backends.object.stores.errors import AccessDenied, StoreError
from kvtier.backends.object.stores.file_store import FileStore
from kvtier.cli import doctor as checks
from kvtier.cli.doctor import check_gds, check_machine, check_order, check_rates
from kvtier.cli.inspect import inspector_of
from kvtier.config import LoadPolicy, RateSettings, StackConfig, load
from kvtier.config.loader import rate_owner
from kvtier.cost.rates import Rates, SavedLink, SavedPrefill
from kvtier.cost.saved_rates import RatesFile
from kvtier.inspect import Finding, Level
from kvtier.system import memory as room
from kvtier.system.disk import Disk, mounted
from kvtier.system.memory import Topology
from kvtier.testing.subject import make_memory_folder
from kvtier.vllm.hooks import versions
from kvtier.vllm.hooks.touch_points import TOUCH_POINTS


def run(stack_file: Path, *args: str, code: int = 0) -> Any:
    done = command("doctor", "-c", stack_file, "--json", *args)
    assert done.code == code, done.err
    return json.loads(done.out)


def run_gc(stack_file: Path) -> list[Any]:
    found: list[Any] = json.loads(command("gc", "-c", stack_file, "--json").out)["found"]
    return found


def check_tier(config: StackConfig, tier: int) -> Generator[Finding]:
    yield from inspector_of(config, tier).checks()
    yield from check_gds(config, tier)


def levels(stack_file: Path, tier: int) -> dict[str, Level]:
    return {finding.what: finding.level for finding in check_tier(load(stack_file), tier)}


def test_a_good_stack(stack_file: Path) -> None:
    report = run(stack_file)
    assert report["ok"]
    assert [tier["hits"] for tier in report["measured"]] == [64, 32]
    assert any("O_DIRECT works" in finding["what"] for finding in report["findings"])


def test_every_finding_that_matters_says_what_to_do(stack_file: Path) -> None:
    for finding in run(stack_file, "--no-measure")["findings"]:
        assert finding["remedy"] or finding["level"] == "ok"


def test_what_engines_have_learned_is_told(stack_file: Path, tmp_path: Path) -> None:
    config = load(stack_file)
    facts = {
        "platform": "a card",
        "tensor_parallel": "2",
        "model": "a model",
        "dtype": "torch.bf16",
    }
    facts |= {"model_config": "0123456789abcdef" * 2, "quantization": "None,None"}
    owner, folder = rate_owner(config, facts), tmp_path / "rates"
    rates = Rates({"nvme": SavedLink(0.0005, 0.5)}, SavedPrefill(0.025, 0.0, 8192))
    RatesFile(folder, owner).write(rates)
    RatesFile(folder, msgspec.structs.replace(owner, stack="another")).write(rates)
    config = msgspec.structs.replace(config, rates=RateSettings(path=str(folder)))
    (finding,) = check_rates(config)
    assert (finding.area, finding.level) == ("rates", Level.OK)
    for part in ("a model bf16 on a card tensor_parallel 2", "40,000 tokens/s", "500 us"):
        assert part in finding.what
    for other in ({"rates": RateSettings(keep=False)}, {"load_policy": LoadPolicy.ALWAYS}):
        assert not list(check_rates(msgspec.structs.replace(config, **other)))


def test_for_people(stack_file: Path) -> None:
    done = command("doctor", "-c", stack_file, "--no-measure")
    assert done.code == 0
    assert "ok 1 nvme: O_DIRECT works" in done.said


@pytest.mark.slow
def test_nothing_is_left_behind(stack_file: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    run(stack_file)
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_measured_where_nothing_can_work(stack_file: Path) -> None:
    stack_file.write_text(stack_file.read_text().replace("free_floor: 0", "free_floor: 9000TiB"))
    report = run(stack_file, code=1)
    assert report["measured"] == []
    assert any("nothing can be stored" in finding["what"] for finding in report["findings"])
    assert report["findings"][-1]["what"] == "not measured"
    assert report["findings"][-1]["remedy"]


def test_more_taken_than_allowed(filled: Path) -> None:
    filled.write_text(filled.read_text().replace("16MiB", "1MiB"))
    said = levels(filled, 1)
    assert any("where 1 MiB are allowed" in what for what in said if said[what] is Level.WARN)


def test_host_memory_on_a_disk_is_said(stack_file: Path) -> None:
    found = levels(stack_file, 0)
    if mounted(stack_file.parent)[0] != "tmpfs":
        assert any("not memory" in what for what, level in found.items() if level is Level.WARN)


def test_memory_that_is_not_there_is_missed_before_an_engine_does(
    stack_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "in_memory", lambda folder: True)
    assert not any("does not fit" in what for what in levels(stack_file, 0))
    monkeypatch.setattr(room, "memory_left", lambda: 1 << 20)
    warned = [what for what, level in levels(stack_file, 0).items() if level is Level.WARN]
    assert any("only 1 MiB of memory: it does not fit" in what for what in warned)


def test_huge_pages_that_are_not_given_are_said(
    stack_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack_file.write_text(
        stack_file.read_text().replace("kind: cpu,", "kind: cpu, huge_pages: true,")
    )
    for reason, level in ((None, Level.OK), ("remount it", Level.WARN)):
        monkeypatch.setattr(cpu_inspect, "no_huge_pages", lambda folder, reason=reason: reason)
        said = levels(stack_file, 0)
        assert [said[what] for what in said if "huge pages" in what] == [level]


def test_a_folder_that_is_another_elsewhere(
    stack_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack_file.write_text(stack_file.read_text().replace(f"{tmp_path}/disk/blocks", "disk/blocks"))
    monkeypatch.chdir(tmp_path)
    (finding,) = [each for each in check_tier(load(stack_file), 1) if each.level is Level.WARN]
    assert f"disk/blocks is {tmp_path}/disk/blocks here" in finding.what
    assert finding.remedy == f"write path: {tmp_path}/disk/blocks"


def test_what_is_there_counts_as_room_for_what_is_wanted(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine takes its slabs over, and makes more, or gives some up."""
    monkeypatch.setattr(Disk, "free_bytes", lambda disk, folder: 1 << 20)
    text = filled.read_text()
    for capacity, level in (("4MiB", Level.OK), ("4900KiB", Level.OK), ("6MiB", Level.WARN)):
        filled.write_text(text.replace("4MiB", capacity))
        said = levels(filled, 0)
        assert [said[what] for what in said if " wanted, " in what] == [level]
    assert any("it does not fit" in what for what in said)


def test_host_memory_under_a_name_that_no_engine_has_any_more_is_named(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not old enough for `gc`, and the stack under its new name does not know it."""
    filled.write_text(filled.read_text().replace("name: cli", "name: renamed"))
    old = tmp_path / "host" / f"kvtier-{os.getuid()}-kv-cli"
    assert run_gc(filled) == []
    monkeypatch.setattr(Disk, "free_bytes", lambda disk, folder: 1 << 20)
    (finding,) = [each for each in check_tier(load(filled), 0) if "does not fit" in each.what]
    assert f"no engine uses {old} now" in finding.remedy


def test_a_region_larger_than_what_is_free(stack_file: Path) -> None:
    stack_file.write_text(stack_file.read_text().replace("4MiB", "100%"))
    found = levels(stack_file, 0)
    assert any("does not fit" in what for what, level in found.items() if level is Level.WARN)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_takes_not_one_block_more(
    filled: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", full)
    (finding,) = [each for each in check_tier(load(filled), 1) if os.strerror(number) in each.what]
    assert (finding.level, finding.remedy) == (Level.WARN, "free some room there")


@pytest.mark.parametrize("free", [0, 4 << 20])
def test_a_folder_on_a_full_disk_keeps_what_it_has(
    filled: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr(Disk, "free_bytes", lambda disk, folder: free)
    filled.write_text(filled.read_text().replace("16MiB", "64MiB"))
    found = levels(filled, 1)
    assert Level.BAD not in found.values()
    assert any("will stay smaller" in what for what in found)


@pytest.mark.parametrize(
    ("writes", "said"),
    [
        (["through"], []),
        (["on_evict"], []),
        (["through", "never"], []),
        (["through", "through"], ["2 nvme: holds the same blocks as tier 1"]),
        (["through", "on_evict"], []),
        (
            ["through", "on_evict", "through"],
            ["3 nvme: gets what tier 2 has, and that only what the tier above it lets go"],
        ),
    ],
)
def test_what_tiers_get_of_those_above(
    stack_file: Path, tmp_path: Path, writes: list[str], said: list[str]
) -> None:
    text = "version: 1\ntiers:\n  - {kind: memory, capacity: 1MiB}\n"
    for disk, write in enumerate(writes):
        path = tmp_path / f"disk{disk}"
        text += f"  - {{kind: nvme, path: '{path}', capacity: 16MiB, write: {write}}}\n"
    stack_file.write_text(text)
    found = [f"{each.area}: {each.what}" for each in check_order(load(stack_file))]
    assert found == said


@pytest.mark.parametrize(("free", "level"), [(1 << 20, Level.BAD), (3 << 19, Level.WARN)])
def test_no_slab_is_made_of_the_last_of_a_disk(
    stack_file: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: Level
) -> None:
    """A quarter of one stays free above the floor: 1 MiB here."""
    monkeypatch.setattr(Disk, "free_bytes", lambda disk, path: free)
    (found,) = [what for what in levels(stack_file, 1) if "allowed, room for" in what]
    assert levels(stack_file, 1)[found] is level


def test_a_disk_that_is_memory(stack_file: Path) -> None:
    folder = make_memory_folder()
    try:
        text = stack_file.read_text().replace(str(stack_file.parent / "disk"), str(folder))
        stack_file.write_text(text)
        found = levels(stack_file, 1)
    finally:
        folder.rmdir()
    assert found["/dev/shm/" + folder.name + " is tmpfs: memory, not a disk"] is Level.WARN


@pytest.mark.parametrize(
    ("gds", "reason", "level"),
    [
        ("auto", None, Level.OK),
        ("auto", "there is no CUDA device", Level.NOTE),
        ("require", "there is no CUDA device", Level.BAD),
        ("off", None, None),
    ],
)
def test_gpudirect_storage_as_the_stack_asks_for_it(
    stack_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    gds: str,
    reason: str | None,
    level: Level | None,
) -> None:
    monkeypatch.setattr(checks, "probe_gds", lambda folder: reason)
    stack_file.write_text(f"gds: {gds}\n{stack_file.read_text()}")
    found = {what: level for what, level in levels(stack_file, 1).items() if "GPUDirect" in what}
    assert list(found.values()) == ([level] if level else [])


def test_nodes_are_told_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Topology, "gpus", lambda self: [0, 1])
    monkeypatch.setattr(checks, "Topology", lambda: machine)
    machine = Topology()
    machine.nodes = [0, 1]
    (found,) = [each for each in check_machine() if each.area == "numa"]
    assert found.what == "2 NUMA nodes; GPUs are at 0, 1"
    machine.nodes = [0]
    assert not [each for each in check_machine() if each.area == "numa"]


@pytest.mark.parametrize(
    ("version", "moved", "level"),
    [
        ("0.32.0+cpu", None, Level.OK),
        ("0.32.1", [], Level.OK),
        ("0.94.0", [], Level.WARN),
        ("0.94.0", ["Engine.step is not there"], Level.BAD),
    ],
)
def test_a_vllm_by_what_it_has(
    version: str, moved: list[str] | None, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [versions.TouchPointCheck(TOUCH_POINTS[0], moved or [])]
    monkeypatch.setattr(versions, "version", lambda name: version)
    monkeypatch.setattr(versions, "touch_points", lambda found: points)
    (finding,) = [each for each in checks.check_machine() if each.area == "vllm"]
    assert finding.level is level
    assert version in finding.what
    assert finding.remedy or level is Level.OK


def test_a_look_into_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a stack; here into one that has nothing inside."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('it is not imported')\n")
    (tmp_path / "vllm-0.94.0.dist-info").mkdir()
    metadata = tmp_path / "vllm-0.94.0.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.94.0\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    done = command("doctor", "--vllm", "--json")
    assert done.code == 1
    said = json.loads(done.out)
    assert (said["version"], said["tested"]) == ("0.94.0", False)
    assert all(each["moved"] and each["why"] for each in said["touch_points"])
    done = command("doctor", "--vllm")
    assert done.code == 1
    assert "vLLM 0.94.0 (never tested; tested are 0.32 and 0.33)" in done.said
    assert f"0 of {len(said['touch_points'])} touch-points are there" in done.said


def test_without_a_stack_there_is_nothing_else_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # else a stack.yaml of this checkout would be looked at
    done = command("doctor", before=["env"])
    assert done.code == 2
    assert "--config: is missing" in done.err


@pytest.mark.slow
def test_a_store_that_refuses_to_delete_several_at_once_is_found_out(
    stack_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a bucket that is another request, with a right of its own perhaps."""

    class Refusing(FileStore):
        def delete(self, names: Sequence[str], **more: Any) -> Mapping[str, StoreError]:
            if len(names) > bucket_store._FEW:
                raise AccessDenied("no POST here")
            return super().delete(names, **more)

    store = Refusing(tmp_path / "store")
    stack_file.write_text(
        f'{stack_file.read_text()}  - {{kind: object, url: "file://{tmp_path}/store", '
        "capacity: 1GiB}\n"
    )
    monkeypatch.setattr(check_store, "open_for", lambda settings: store)
    store.put("x", [memoryview(b"a folder that is there")])
    (bad,) = [what for what, level in levels(stack_file, 2).items() if level is Level.BAD]
    assert bad == "delete of several: no POST here"
    assert levels(stack_file, 2)["objects may be deleted"] is Level.OK
    assert [info.name for info in store.list()] == ["x"]


def test_who_stops_listening_amid_a_store_hears_no_more(stack_file: Path, tmp_path: Path) -> None:
    """As a reader does that takes the first lines; what was written to the store goes even so."""
    store = FileStore(tmp_path / "store")
    settings = f'{{kind: object, url: "file://{tmp_path}/store", capacity: 1GiB}}'
    stack_file.write_text(f"{stack_file.read_text()}  - {settings}\n")
    findings = check_tier(load(stack_file), 2)
    assert any(each.what == "objects may be written" for each in findings)
    assert len(list(store.list())) == 1
    findings.close()
    assert not list(store.list())
