"""Reading a stack: what is right is read once into types, what is wrong is named with its place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import LoadPolicy, MoverMode, StackConfig, effective, folders, load
from kvtier.config.document import FILE_BYTES_MAX
from kvtier.errors import ConfigErrors
from kvtier.settings import Admission, ByteSize, Capacity, Duration, WritePolicy

pytestmark = pytest.mark.usefixtures("other_tiers")

BENCH = {"kind": "bench", "capacity": "1GiB"}


@pytest.fixture
def shelf(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "shelf"
    folder.mkdir()
    return {"kind": "shelf", "capacity": "80%", "path": str(folder)}


def stack(*tiers: object, **more: object) -> dict[str, object]:
    return {"version": 1, "tiers": list(tiers), **more}


def wrong(source: Any, **options: Any) -> list[tuple[str, str, str]]:
    with pytest.raises(ConfigErrors) as caught:
        load(source, **options)
    return [(each.place, each.problem, each.remedy) for each in caught.value.errors]


def the_one(source: Any, **options: Any) -> tuple[str, str, str]:
    errors = wrong(source, **options)
    assert len(errors) == 1, errors
    return errors[0]


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


GOOD = """\
version: 1
name: left
chunk_tokens: 512
mover: {mode: threads}
tiers:
  - kind: bench
    capacity: 64GiB
    load_deadline: 250ms
  - {kind: shelf, capacity: 80%, path: FOLDER, admission: second_touch, part_size: 1048576}
"""


def test_a_file_becomes_types(tmp_path: Path, shelf: dict[str, Any]) -> None:
    config = load(write(tmp_path, GOOD.replace("FOLDER", shelf["path"])))
    assert (config.name, config.chunk_tokens, config.mover.mode) == ("left", 512, MoverMode.THREADS)
    first, second = config.tiers
    assert first.kind == "bench"
    assert first.capacity == Capacity(ByteSize(64 << 30))
    assert first.load_deadline == Duration(0.25)
    assert second.kind == "shelf"
    assert second.capacity.share == 0.8
    assert second.admission is Admission.SECOND_TOUCH
    assert second.write is WritePolicy.ON_EVICT
    assert second.path == Path(shelf["path"])  # type: ignore[attr-defined]
    assert second.part_size == ByteSize(1 << 20)  # type: ignore[attr-defined]


def test_a_file_a_path_as_text_and_dicts_mean_the_same(
    tmp_path: Path, shelf: dict[str, Any]
) -> None:
    path = write(tmp_path, GOOD.replace("FOLDER", shelf["path"]))
    inline = stack(
        BENCH | {"capacity": 64 << 30, "load_deadline": 0.25},
        shelf | {"admission": "second_touch", "part_size": "1MiB"},
        name="left",
        chunk_tokens=512,
        mover={"mode": "threads"},
    )
    assert load(path) == load(str(path)) == load(inline)


def test_defaults_need_not_be_written() -> None:
    assert load(stack(BENCH)) == load(stack(BENCH, name="default", mover={"mode": "auto"}))


WRONG: list[tuple[dict[str, object], str, str, str]] = [
    ({"capcity": 3}, "$.tiers[0].capcity", "unknown key", 'did you mean "capacity"'),
    ({"zzz": 3}, "$.tiers[0].zzz", "unknown key", "known are kind, capacity"),
    ({"secret_key": "x"}, "$.tiers[0].secret_key", "unknown key", "come from the environment"),
    ({"a b": 3}, "$.tiers[0]['a b']", "unknown key", "known are"),
    ({"capacity": "64G"}, "$.tiers[0].capacity", "'G' is not a unit", 'did you mean "64GiB"'),
    ({"capacity": -1}, "$.tiers[0].capacity", "negative", "0 or more"),
    ({"capacity": "180%"}, "$.tiers[0].capacity", "not a share", "1% to 100%"),
    ({"capacity": None}, "$.tiers[0].capacity", "nothing is not a size", "GiB"),
    ({"capacity": 0}, "$.tiers[0].capacity", "holds no block", "write more"),
    ({"queue_blocks": -1}, "$.tiers[0].queue_blocks", ">= 1", "a whole number, 1 or more"),
    ({"queue_blocks": "many"}, "$.tiers[0].queue_blocks", "got a text", "a whole number"),
    ({"load_deadline": 5, "store_deadline": "5"}, "$.tiers[0].store_deadline", "no unit", "ms"),
    ({"load_deadline": float("nan")}, "$.tiers[0].load_deadline", "too long", "100 years"),
    ({"write": "on_evct"}, "$.tiers[0].write", "'on_evct' is not one", 'did you mean "on_evict"'),
    ({"write": "sometimes"}, "$.tiers[0].write", "not one", "through, on_evict, never"),
    ({"write": "on_evict"}, "$.tiers[0].write", "no tier stands above", "through"),
    ({"name": 5}, "$.tiers[0].name", "expected a text", "a text"),
    ({"kind": "bnch"}, "$.tiers[0].kind", "no tier kind 'bnch'", 'did you mean "bench"'),
    ({"kind": 5}, "$.tiers[0].kind", "no tier kind 5", "installed are"),
    ({"kind": "broken"}, "$.tiers[0].kind", "cannot be imported", "reinstall"),
    ({"kind": "raising"}, "$.tiers[0].kind", "cannot be imported: no device", "reinstall"),
    ({"kind": "stranger"}, "$.tiers[0].kind", "does not name a Backend", "correct the package"),
]


@pytest.mark.parametrize(("change", "place", "problem", "remedy"), WRONG)
def test_one_mistake_in_a_tier(
    change: dict[str, object], place: str, problem: str, remedy: str
) -> None:
    found = the_one(stack(BENCH | change))
    assert found[0] == place
    assert problem in found[1]
    assert remedy in found[2]


WRONG_TOP: list[tuple[object, str, str, str]] = [
    ({}, "$", 'lacks "version"', "version: 1"),
    (stack(), "$.tiers", "1 to 8 tiers", "fastest first"),
    (stack(*[BENCH] * 9), "$.tiers", "1 to 8 tiers", "fastest first"),
    (stack(5), "$.tiers[0]", "a tier is a mapping", "kind"),
    (stack({"capacity": 5}), "$.tiers[0]", 'lacks "kind"', "bench"),
    (stack({"kind": "bench"}), "$.tiers[0]", 'lacks "capacity"', "capacity: 64GiB"),
    (stack(BENCH) | {"version": 2}, "$.version", "reads version 1, not 2", "update kvtier"),
    (stack(BENCH) | {"version": "1"}, "$.version", "not '1'", "version: 1"),
    (stack(BENCH) | {"version": True}, "$.version", "not True", "version: 1"),
    (stack(BENCH, tier=[]), "$.tier", "unknown key", 'did you mean "tiers"'),
    (stack(BENCH, name="../up"), "$.name", "'../up' is not of this form", "a text of letters"),
    (stack(BENCH, chunk_tokens=0), "$.chunk_tokens", ">= 1", "1 or more"),
    (stack(BENCH, mover="process"), "$.mover", "a single value", "mapping with mode"),
    (stack(BENCH, mover={"mode": "x"}), "$.mover.mode", "not one", "auto, process, threads"),
    (stack(BENCH, mover={"mod": "x"}), "$.mover.mod", "unknown key", "mode"),
    (stack(BENCH, name=b"x"), "$.name", "a bytes cannot stand here", "plain values"),
    ({5: 1, **stack(BENCH)}, "$", "a key is not a text", "names of settings"),
]


@pytest.mark.parametrize(("source", "place", "problem", "remedy"), WRONG_TOP)
def test_one_mistake_at_the_top(source: object, place: str, problem: str, remedy: str) -> None:
    found = wrong(source)[0]
    assert found[0] == place
    assert problem in found[1]
    assert remedy in found[2]


def test_nested_settings_have_places_too(shelf: dict[str, Any]) -> None:
    errors = wrong(stack(BENCH, shelf | {"door": {"usr": "x", "tries": 0}}))
    assert sorted(place for place, _, _ in errors) == [
        "$.tiers[1].door",
        "$.tiers[1].door.tries",
        "$.tiers[1].door.usr",
    ]
    optional = the_one(stack(BENCH, shelf | {"access": {"user": "x", "tries": "many"}}))
    assert optional[0] == "$.tiers[1].access.tries"


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"colour": "gren"}, 'did you mean "green"?'),
        ({"colour": "blue"}, "write one of red, green"),
        ({"colour": 5}, "write one of red, green"),
        ({"open": "yes"}, "write true or false"),
        ({"open": 1}, "write true or false"),
        ({"rate": "fast"}, "write a number"),
        ({"path": 5}, "write a folder or file in quotes"),
        ({"access": {"user": 5}}, ""),
    ],
)
def test_remedies_follow_the_type(
    shelf: dict[str, Any], change: dict[str, object], remedy: str
) -> None:
    assert the_one(stack(BENCH, shelf | change))[2] == remedy


def test_all_mistakes_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    text = (
        "version: 1\ntires: []\ntiers:\n  - kind: bench\n    capacity: 5 apples\n  - kind: nope\n"
    )
    path = write(tmp_path, text)
    with pytest.raises(ConfigErrors) as caught:
        load(path)
    errors = caught.value.errors
    assert [each.line.removeprefix(str(path)) for each in errors] == [":2:1", ":5:5", ":6:5"]
    assert str(caught.value).count("\n") == 2
    assert str(errors[1]).startswith(f"{path}:5:5: $.tiers[0].capacity: 'apples'")


def test_the_first_tier_is_host_memory(shelf: dict[str, Any]) -> None:
    place, problem, remedy = the_one(stack(shelf | {"write": "through"}, BENCH))
    assert place == "$.tiers[0].kind"
    assert "host memory" in problem
    assert "bench" in remedy


def test_two_tiers_on_one_path(shelf: dict[str, Any]) -> None:
    twin = shelf | {"path": shelf["path"] + "/../shelf"}
    place, problem, _ = the_one(stack(BENCH, shelf, twin))
    assert place == "$.tiers[2].path"
    assert "$.tiers[1] uses" in problem


LONG = "/" + "x" * 300


@pytest.mark.parametrize(
    ("path", "problem", "remedy"),
    [
        ("FOLDER/gone", "gone", "make it"),
        (LONG, f"{LONG}: File name too long", ""),
        ("a\0b", "NUL", ""),
    ],
    ids=["missing", "too long", "NUL"],
)
def test_a_path_that_cannot_be(
    tmp_path: Path, shelf: dict[str, Any], path: str, problem: str, remedy: str
) -> None:
    path = path.replace("FOLDER", str(tmp_path))
    found = the_one(stack(BENCH, shelf | {"path": path}))
    assert found[0] == "$.tiers[1].path"
    assert problem in found[1]
    assert found[2]
    assert remedy in ("", found[2])


def test_a_capacity_smaller_than_one_block() -> None:
    source = stack(BENCH | {"capacity": "1MiB"})
    assert load(source, record_bytes=1 << 20)
    assert the_one(source, record_bytes=(1 << 20) + 1)[0] == "$.tiers[0].capacity"


TIERS = b"tiers: [{kind: bench, capacity: 1MiB}]\n"
FILES: list[tuple[bytes, str]] = [
    (b"", "is empty"),
    (b"# only words\n", "is empty"),
    (b"version: [1\n", "not YAML"),
    (b"version: 1\n\ttiers: []\n", "not YAML"),
    (b"tiers:\n  - kind: cpu\n   capacity: 1GiB\n", "this line is not indented as those"),
    (b"version: 1\n---\nversion: 1\n", "not YAML: expected a single document"),
    (b"\xff\xfeversion", "not UTF-8"),
    (b"version: 1\x00", "not YAML"),
    (TIERS + b"version: 1\nversion: 1\n", "stands twice, again in line 3"),
    (TIERS + b"&v version: 1\n*v : 1\n", "a key stands twice"),
    (b"version: 1\n? [a]\n: 1\n", "a key is not a text"),
    (TIERS + b"version: !!python/name:os.system\n", "the tag"),
    (TIERS + b"version: !!int one\n", "is no YAML int"),
    (TIERS + b"version: !!bool yes\n", "'yes' is no YAML bool"),
    (TIERS + b"version: !!set {a}\n", "the tag"),
    (b"- version\n", "is a list"),
    (b"just words\n", "is a single value"),
    (b"version: *gone\n", "not YAML"),
    (b"a: &a [*a]\n", "nested too deep"),
    (b"#" * (FILE_BYTES_MAX + 1), "has more than"),
]


@pytest.mark.parametrize(("data", "problem"), FILES)
def test_files_that_are_no_stack(tmp_path: Path, data: bytes, problem: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(write(tmp_path, data))
    assert problem in caught.value.errors[0].problem
    assert caught.value.errors[0].remedy


def test_a_bomb_of_aliases_is_refused_before_it_grows(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "repeated too often" in wrong(write(tmp_path, "\n".join(lines)))[0][1]


def test_aliases_are_fine(tmp_path: Path, shelf: dict[str, Any]) -> None:
    text = GOOD.replace("64GiB", "&size 64GiB").replace("80%", "*size")
    config = load(write(tmp_path, text.replace("FOLDER", shelf["path"])))
    assert config.tiers[0].capacity == config.tiers[1].capacity


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    text = "\ufeffversion: 1\ntiers: [{kind: bench, capacity: 5}]\n"
    assert isinstance(load(write(tmp_path, text)), StackConfig)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no such file" in the_one(tmp_path / "gone.yaml")[1]
    assert "cannot be read" in the_one(tmp_path)[1]


class TestEnvironment:
    def test_values_and_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SIZE", "2")
        monkeypatch.setenv("EMPTY", "")
        monkeypatch.delenv("NOT_SET", raising=False)
        tier = BENCH | {
            "capacity": "${SIZE}GiB",
            "name": "a${EMPTY}b-${EMPTY:-c}-${NOT_SET:-d:-e}-$${SIZE}-$SIZE-${NOT_SET:-}",
        }
        (settings,) = load(stack(tier)).tiers
        assert settings.capacity == Capacity(ByteSize(2 << 30))
        assert settings.name == "ab-c-d:-e-${SIZE}-$SIZE-"  # type: ignore[attr-defined]

    def test_numbers_and_switches(
        self, monkeypatch: pytest.MonkeyPatch, shelf: dict[str, Any]
    ) -> None:
        monkeypatch.setenv("BLOCKS", "77")
        monkeypatch.setenv("RATE", "2.5")
        monkeypatch.setenv("OPEN", "false")
        tier = shelf | {"queue_blocks": "${BLOCKS}", "rate": "${RATE}", "open": "${OPEN}"}
        settings: Any = load(stack(BENCH, tier)).tiers[1]
        assert (settings.queue_blocks, settings.rate, settings.open) == (77, 2.5, False)

    def test_keys_are_never_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KEY", "capacity")
        assert wrong(stack({"kind": "bench", "${KEY}": 5}))[0][1] == 'unknown key "${KEY}"'

    @pytest.mark.parametrize("text", ["${}", "${1X}", "${X", "${X:=1}", "${X Y}", "${X:-${Y}}"])
    def test_what_names_no_variable(self, text: str) -> None:
        place, problem, remedy = the_one(stack(BENCH | {"name": text}))
        assert place == "$.tiers[0].name"
        assert "names no variable" in problem
        assert "${NAME}" in remedy

    @pytest.mark.parametrize("value", ["\ud800", "${BYTES}"])
    def test_what_is_no_text(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("BYTES", os.fsdecode(b"\xff"))
        place, problem, _ = the_one(stack(BENCH | {"eviction": value}))
        assert (place, problem) == ("$.tiers[0].eviction", "holds bytes that are no UTF-8 text")

    def test_a_variable_that_is_not_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NOT_SET", raising=False)
        place, problem, remedy = the_one(stack(BENCH | {"name": "x${NOT_SET}"}))
        assert (place, problem) == ("$.tiers[0].name", "the environment has no variable NOT_SET")
        assert "${NOT_SET:-default}" in remedy

    def test_what_cannot_be_read_hides_no_other_mistake_and_makes_none(
        self, monkeypatch: pytest.MonkeyPatch, shelf: dict[str, Any]
    ) -> None:
        monkeypatch.delenv("NOT_SET", raising=False)
        shelf |= {"capacity": "${NOT_SET}", "path": "${NOT_SET}/x", "open": {1: True}, "rat": 1}
        source = stack(BENCH | {"name": "\0", "queue_blocks": 0}, shelf) | {"version": "${}"}
        assert [(place, problem.partition(" ")[0]) for place, problem, _ in wrong(source)] == [
            ("$.version", "'${}'"),
            ("$.tiers[0].name", "holds"),
            ("$.tiers[1].capacity", "the"),
            ("$.tiers[1].path", "the"),
            ("$.tiers[1].open", "a"),
            ("$.tiers[0].queue_blocks", "expected"),
            ("$.tiers[1].rat", "unknown"),
        ]

    @pytest.mark.parametrize("secret", ["hunter2-hunter2", 'it\'s\\a "secret"\n', "xy"])
    @pytest.mark.parametrize("key", ["capacity", "write", "queue_blocks", "load_deadline", "path"])
    def test_values_are_never_shown(
        self, monkeypatch: pytest.MonkeyPatch, shelf: dict[str, Any], secret: str, key: str
    ) -> None:
        monkeypatch.setenv("SECRET", secret)
        with pytest.raises(ConfigErrors) as caught:
            load(stack(BENCH, shelf | {key: "${SECRET}"}))
        for error in caught.value.errors:
            assert secret not in str(error)
            assert repr(secret)[1:-1] not in str(error)

    @pytest.mark.parametrize("key", ["write", "kind"])
    def test_nor_beside_quotation_marks(self, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
        monkeypatch.setenv("SECRET", "it's-hunter2")
        for text in ('say "${SECRET}"', "say '${SECRET}'", "${SECRET}"):
            problem = the_one(stack(BENCH | {key: text}))[1]
            assert "${SECRET}" in problem
            assert "hunter2" not in problem

    @pytest.mark.parametrize("secret", ["hunter2-" * 12, "8675309jenny", "4711secs"])
    @pytest.mark.parametrize("key", ["capacity", "load_deadline"])
    def test_nor_are_parts_of_them(
        self, monkeypatch: pytest.MonkeyPatch, secret: str, key: str
    ) -> None:
        monkeypatch.setenv("SECRET", secret)
        place, problem, remedy = the_one(stack(BENCH | {key: "${SECRET}"}))
        assert place == f"$.tiers[0].{key}"
        assert problem.startswith("'${SECRET}' is not a ")
        assert secret[:7] not in problem + remedy
        assert secret[-5:] not in problem + remedy

    def test_listings_name_the_variable(
        self, monkeypatch: pytest.MonkeyPatch, shelf: dict[str, Any]
    ) -> None:
        monkeypatch.setenv("FOLDER", shelf["path"])
        monkeypatch.setenv("TOKEN", "hunter2")
        tier = shelf | {"path": "${FOLDER}", "access": {"user": "me", "token": "${TOKEN}"}}
        plain = shelf | {"path": "${NOT_SET:-/}", "access": {"user": "me", "token": "hunter3"}}
        values = effective(stack(BENCH, tier, plain))
        assert values["tiers"][1]["path"] == "${FOLDER}"
        assert values["tiers"][1]["access"]["token"] == "${TOKEN}"
        assert values["tiers"][2]["path"] == "/"
        assert values["tiers"][2]["access"]["token"] == "(secret)"
        assert "hunter" not in str(values) + repr(load(stack(BENCH, tier, plain)))


def test_what_is_shown_can_be_read_again(shelf: dict[str, Any]) -> None:
    source = stack(BENCH, shelf | {"access": {"user": "me"}}, name="left")
    assert load(effective(source)) == load(source)


def test_direct_reads_can_be_required_only_of_a_local_disk(tmp_path: Path) -> None:
    memory = {"kind": "cpu", "capacity": "1MiB", "path": str(tmp_path)}
    disk = {"kind": "nvme", "capacity": "1GiB", "path": str(tmp_path / "nvme")}
    for gds in ("auto", "off"):
        assert load({"version": 1, "gds": gds, "tiers": [memory]}).gds.value == gds
    found = load({"version": 1, "gds": "require", "tiers": [memory, disk]})
    assert folders(found) == [tmp_path / "nvme"]
    with pytest.raises(ConfigErrors, match=r"\$\.gds: no tier lies on a local disk"):
        load({"version": 1, "gds": "require", "tiers": [memory]})


MEMORY = {"version": 1, "tiers": [{"kind": "memory", "capacity": "64MiB"}]}
OLD_NAMES = {
    "loads": "worthwhile",
    "prefetch": {"restart": 0.5},
    "retain": {"longest": "2h"},
}


def test_the_names_of_before_are_read_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    found = load(MEMORY | OLD_NAMES)
    assert found.load_policy is LoadPolicy.COST_MODEL
    assert found.prefetch.warmup_share == 0.5
    assert found.retain.max_ttl.seconds == 7200.0
    for name in ("load_policy", "cost_model", "warmup_share", "max_ttl"):
        assert any(name in message for message in caplog.messages)


def test_the_names_of_today_are_read_without_one(caplog: pytest.LogCaptureFixture) -> None:
    load(MEMORY | {"load_policy": "always", "retain": {"max_ttl": "2h"}})
    assert caplog.messages == []


def test_one_that_stands_there_twice_is_a_mistake() -> None:
    with pytest.raises(ConfigErrors, match="loads"):
        load(MEMORY | {"loads": "always", "load_policy": "always"})
