"""The tiers that kvtier brings: every mistake in their settings has its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.config import StackConfig, load
from kvtier.config.loader import rate_owner, rates_folder
from kvtier.errors import ConfigErrors

RECORD = (1 << 20) + 4096


def stack(folder: Path, cpu: dict[str, object], nvme: dict[str, object]) -> dict[str, Any]:
    first = {"kind": "cpu", "capacity": "64MiB", "path": str(folder)} | cpu
    second = {"kind": "nvme", "capacity": "1GiB", "path": str(folder / "blocks")} | nvme
    return {"version": 1, "tiers": [first, second]}


@pytest.mark.parametrize(
    ("cpu", "nvme", "place"),
    [
        ({"capacity": "1MiB"}, {}, "$.tiers[0].capacity"),
        ({"capacity": "900TiB"}, {}, "$.tiers[0].capacity"),
        ({"eviction": "random"}, {}, "$.tiers[0].eviction"),
        ({"load_deadline": 0}, {}, "$.tiers[0].load_deadline"),
        ({}, {"store_deadline": "0s"}, "$.tiers[1].store_deadline"),
        ({"path": "/no/such/folder"}, {}, "$.tiers[0].path"),
        ({"name": "a/b"}, {}, "$.tiers[0].name"),
        ({"name": "a\nb"}, {}, "$.tiers[0].name"),
        ({"huge_pages": "please"}, {}, "$.tiers[0].huge_pages"),
        ({"persistence": "maybe"}, {}, "$.tiers[0].persistence"),
        ({}, {"capacity": "1MiB"}, "$.tiers[1].capacity"),
        ({}, {"capacity": "900TiB"}, "$.tiers[1].capacity"),
        ({}, {"capacity": "0.0001%"}, "$.tiers[1].capacity"),
        ({}, {"eviction": "random"}, "$.tiers[1].eviction"),
        ({}, {"path": "/no/such/folder"}, "$.tiers[1].path"),
        ({}, {"path": "/dev/null/x"}, "$.tiers[1].path"),
        ({}, {"free_floor": "-5GiB"}, "$.tiers[1].free_floor"),
        ({}, {"free_floor": "5 GB B"}, "$.tiers[1].free_floor"),
        ({}, {"threads": 0}, "$.tiers[1].threads"),
        ({}, {"threads": 100_000}, "$.tiers[1].threads"),
        ({}, {"threads": 100_000, "write": "never"}, "$.tiers[1].threads"),
        ({}, {"durability": "forever"}, "$.tiers[1].durability"),
    ],
)
def test_one_mistake(
    tmp_path: Path, cpu: dict[str, object], nvme: dict[str, object], place: str
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(stack(tmp_path, cpu, nvme), record_bytes=RECORD)
    (error,) = caught.value.errors
    assert error.place == place
    assert error.problem
    assert error.remedy


@pytest.mark.parametrize("tier", [0, 1])
def test_a_number_that_was_to_have_a_unit(tmp_path: Path, tier: int) -> None:
    """It is found without the size of a block, too: no engine asks for it while one writes."""
    forgotten = {"capacity": 64}
    with pytest.raises(ConfigErrors) as caught:
        load(stack(tmp_path, *(forgotten if each == tier else {} for each in (0, 1))))
    (error,) = caught.value.errors
    assert error.place == f"$.tiers[{tier}].capacity"
    assert "not one block" in error.problem
    assert "a number without a unit is bytes" in error.remedy


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "blocks").write_text("mine")
    with pytest.raises(ConfigErrors) as caught:
        load(stack(tmp_path, {}, {}))
    assert caught.value.place == "$.tiers[1].path"
    assert (tmp_path / "blocks").read_text() == "mine"


@pytest.mark.parametrize(
    ("path", "short", "meant"),
    [
        ("~/kv/blocks", "~", "${HOME}/kv/blocks"),
        ("$HOME/kv/blocks", "$HOME", "${HOME}/kv/blocks"),
        ("/no/where/$USER", "$USER", "/no/where/${USER}"),
    ],
)
def test_what_nobody_expands(tmp_path: Path, path: str, short: str, meant: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(stack(tmp_path, {}, {"path": path}))
    assert str(caught.value) == (
        f'$.tiers[1].path: {short} stands for nothing here - write "{meant}"'
    )


def test_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "blocks").symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigErrors) as caught:
        load(stack(tmp_path, {}, {}))
    assert f"make {tmp_path}/moved, or correct the link" in str(caught.value)
    (tmp_path / "moved").mkdir()
    load(stack(tmp_path, {}, {}))


def test_a_tier_with_a_field_of_a_wrong_form_is_checked_like_any_other(tmp_path: Path) -> None:
    cpu = {"huge_pages": "please", "eviction": "lru2", "path": "/no/such/folder"}
    nvme = {"capacity": "1 parsec", "treads": 4, "eviction": "lru3", "path": "/no/such/folder"}
    source = stack(tmp_path, cpu, nvme) | {"gds": "perhaps"}
    store = {"kind": "object", "url": "ftp://x/y", "capacity": "1GiB", "threads": "two"}
    source["tiers"].append(store | {"eviction": "lru4"})
    with pytest.raises(ConfigErrors) as caught:
        load(source)
    assert sorted(error.place for error in caught.value.errors) == [
        "$.gds",
        "$.tiers[0].eviction",
        "$.tiers[0].huge_pages",
        "$.tiers[0].path",
        "$.tiers[1].capacity",
        "$.tiers[1].eviction",
        "$.tiers[1].path",
        "$.tiers[1].treads",
        "$.tiers[2].eviction",
        "$.tiers[2].threads",
        "$.tiers[2].url",
    ]


def test_direct_reads_without_a_disk_are_found_beside_other_mistakes(tmp_path: Path) -> None:
    source = stack(tmp_path, {"eviction": "lru2"}, {}) | {"gds": "require", "name": 7}
    del source["tiers"][1]
    with pytest.raises(ConfigErrors) as caught:
        load(source)
    assert sorted(error.place for error in caught.value.errors) == [
        "$.gds",
        "$.name",
        "$.tiers[0].eviction",
    ]


def test_a_store_in_the_folder_of_a_tier(tmp_path: Path) -> None:
    """To clear one of them would take from the other what says whose blocks these are."""
    source = stack(tmp_path, {}, {})
    store = {"kind": "object", "url": f"file://{tmp_path}/blocks", "capacity": "1GiB"}
    source["tiers"].append(store)
    with pytest.raises(ConfigErrors) as caught:
        load(source)
    assert f"$.tiers[1] uses {tmp_path}/blocks too" in str(caught.value)
    load(source | {"tiers": [*source["tiers"][:2], store | {"url": f"file://{tmp_path}/store"}]})


@pytest.mark.parametrize(
    "inner",
    [
        {"kind": "object", "url": "file://{folder}/blocks/store", "capacity": "1GiB"},
        {"kind": "nvme", "path": "{folder}/blocks/more", "capacity": "1GiB"},
    ],
)
def test_a_tier_within_the_folder_of_another(tmp_path: Path, inner: dict[str, str]) -> None:
    """The other would find its whole capacity taken, and keep nothing."""
    (tmp_path / "blocks").mkdir()
    tier = {name: value.format(folder=tmp_path) for name, value in inner.items()}
    source = stack(tmp_path, {}, {})
    with pytest.raises(ConfigErrors) as caught:
        load(source | {"tiers": [*source["tiers"], tier]})
    assert caught.value.errors[0].place == "$.tiers[2]"
    assert f"lies in {tmp_path}/blocks, where all counts as $.tiers[1]'s" in str(caught.value)


@pytest.mark.parametrize("path", ["", "/memory"])
def test_host_memory_within_the_folder_of_a_tier(tmp_path: Path, path: str) -> None:
    host = tmp_path / f"blocks{path}"
    host.mkdir(parents=True)
    with pytest.raises(ConfigErrors) as caught:
        load(stack(tmp_path, {"path": str(host)}, {}))
    assert [error.place for error in caught.value.errors] == ["$.tiers[0]"]
    assert f"lies in {tmp_path}/blocks, where all counts as $.tiers[1]'s" in str(caught.value)


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    load(stack(tmp_path, {}, {}), record_bytes=RECORD)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "a\n", "", ".x", "a" * 65, "\u00e4"])
def test_a_name_that_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(stack(tmp_path, {}, {}) | {"name": name})
    assert caught.value.place == "$.name"


def a_stack(folder: Path, **rates: object) -> StackConfig:
    cpu = {"kind": "cpu", "path": "/dev/shm", "capacity": "1GiB"}
    nvme = {"kind": "nvme", "path": str(folder), "capacity": "1GiB", "free_floor": 0}
    return load({"version": 1, "rates": rates, "tiers": [cpu, nvme]})


def test_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for state, folder in (
        ("/state", "/state/kvtier/rates"),
        ("not/absolute", "/home/somebody/.local/state/kvtier/rates"),
        ("", "/home/somebody/.local/state/kvtier/rates"),
    ):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert rates_folder(a_stack(tmp_path)) == Path(folder)
    assert rates_folder(a_stack(tmp_path, path="/srv/rates")) == Path("/srv/rates")
    assert rates_folder(a_stack(tmp_path, path="~/rates")) == Path("/home/somebody/rates")
    assert rates_folder(a_stack(tmp_path, keep=False)) is None


def test_they_hold_for_a_device_a_model_and_places(tmp_path: Path) -> None:
    facts = {"platform": "a card", "model": "m", "dtype": "bfloat16", "engine": "vllm 1"}
    owner = rate_owner(a_stack(tmp_path), facts)
    assert owner == rate_owner(a_stack(tmp_path), facts | {"engine": "vllm 2"})
    others = [
        rate_owner(a_stack(tmp_path), facts | {"platform": "another card"}),
        rate_owner(a_stack(tmp_path), facts | {"tensor_parallel": "2"}),
        rate_owner(a_stack(tmp_path), facts | {"dtype": "float32"}),
        rate_owner(a_stack(tmp_path / "elsewhere"), facts),
    ]
    assert len({owner, *others}) == 5
    across = facts | {"tensor_parallel": "any"}
    assert rate_owner(a_stack(tmp_path), across) == owner
    assert rate_owner(a_stack(tmp_path), across, ranks=2) == others[1]
