"""`kvtier explain`, and `prewarm` of what prompts ask for: keys as vLLM computes them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash
from support.processes.cli_world import STACK, command, every_kind, put, run, with_store

from kvtier import Stack
from kvtier.backends.object.inspection import inspector, store_survey
from kvtier.cli import app, explain
from kvtier.errors import ConfigError, KVTierError
from kvtier.testing.subject import payload
from kvtier.types import BlockKey, Namespace, block_key
from kvtier.vllm.identity import prompts as prompts_module
from kvtier.vllm.identity.prompts import Prompt, chunk_keys, chunk_tokens, read_prompts
from kvtier.vllm.miss_socket import MissSocket
from kvtier.vllm.misses import Miss
from kvtier.weight_fingerprints import fingerprint_adapter

FACTS = {
    "model": "./model",
    "hash": "sha256_cbor",
    "hash_seed": "default",
    "block_tokens": "16",
    "chunk_blocks": "2",
    "dtype": "bfloat16",
}
ENGINE = Namespace(facts=FACTS, group_bytes=(4096, 4096))
OTHER = Namespace(facts=FACTS | {"dtype": "float16"}, group_bytes=(4096, 4096))
TOKENS = [7 * i % 50000 for i in range(200)]
PROMPT = Prompt(TOKENS)


def store(stack_file: Path, namespace: Namespace, chunks: int) -> None:
    keys = [key for each in chunk_keys(PROMPT, namespace)[:chunks] for key in each]
    with Stack.open(stack_file, namespace, engine="one") as stack:
        stack.store({key: payload(key, namespace) for key in keys})
        assert stack.settle()


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"tokens": TOKENS}) + "\n\n")
    return path


class TestKeys:
    def test_the_first_one_by_hand(self) -> None:
        """CBOR of [32 bytes, [0..15], null], hashed; the start is the hash of a text."""
        start = hashlib.sha256(b"\x6e" + b"vllm-none-hash").digest()
        body = b"\x83\x58\x20" + start + b"\x90" + bytes(range(16)) + b"\xf6"
        one_block = Namespace(facts=FACTS | {"chunk_blocks": "1"}, group_bytes=(1,))
        assert chunk_keys(Prompt(list(range(16))), one_block) == [
            [block_key(hashlib.sha256(body).digest())]
        ]

    def test_numbers_and_texts_take_the_fewest_bytes(self) -> None:
        tokens = [0, 23, 24, 255, 256, (1 << 16) - 1, 1 << 16, (1 << 32) - 1, 1 << 32]
        heads = "00 17 1818 18ff 190100 19ffff 1a00010000 1affffffff 1b0000000100000000"
        salt = b"\x81\x82\x6acache_salt\x78\x18" + 12 * "é".encode()
        start = hashlib.sha256(b"\x6e" + b"vllm-none-hash").digest()
        body = b"\x83\x58\x20" + start + b"\x89" + bytes.fromhex(heads) + salt
        facts = FACTS | {"block_tokens": "9", "chunk_blocks": "1"}
        assert chunk_keys(Prompt(tokens, 12 * "é"), Namespace(facts=facts, group_bytes=(1,))) == [
            [block_key(hashlib.sha256(body).digest())]
        ]

    def test_only_whole_chunks_have_keys(self) -> None:
        assert [len(chunk_keys(Prompt(TOKENS[:n]), ENGINE)) for n in (0, 31, 32, 63, 64)] == [
            0,
            0,
            1,
            1,
            2,
        ]

    def test_a_prefix_has_the_same_keys(self) -> None:
        assert chunk_keys(Prompt(TOKENS[:100]), ENGINE) == chunk_keys(PROMPT, ENGINE)[:3]
        changed = Prompt([*TOKENS[:40], 1, *TOKENS[41:]])
        assert chunk_keys(changed, ENGINE)[0] == chunk_keys(PROMPT, ENGINE)[0]
        assert chunk_keys(changed, ENGINE)[1] != chunk_keys(PROMPT, ENGINE)[1]

    def test_a_seed_makes_others(self) -> None:
        seeded = Namespace(facts=FACTS | {"hash_seed": "7"}, group_bytes=(4096, 4096))
        assert chunk_keys(PROMPT, seeded)[0] != chunk_keys(PROMPT, ENGINE)[0]

    def test_blocks_of_a_context_that_ranks_share_are_longer(self) -> None:
        shared = Namespace(facts=FACTS | {"context_parallel": "1,2,1,1"}, group_bytes=(4096,))
        longer = Namespace(facts=FACTS | {"block_tokens": "32"}, group_bytes=(4096,))
        alone = Namespace(facts=FACTS | {"context_parallel": "1,1,1,1"}, group_bytes=(4096,))
        assert chunk_keys(PROMPT, shared) == chunk_keys(PROMPT, longer) != chunk_keys(PROMPT, alone)
        assert [chunk_tokens(each) for each in (shared, longer, alone)] == [64, 64, 32]

    def test_blocks_may_be_hashed_in_parts(self) -> None:
        parts = Namespace(
            facts=FACTS | {"hash": "sha256_cbor prefix_match_unit=8"}, group_bytes=(4096,)
        )
        shorter = Namespace(
            facts=FACTS | {"block_tokens": "8", "chunk_blocks": "4"}, group_bytes=(4096,)
        )
        assert chunk_keys(PROMPT, parts) == chunk_keys(PROMPT, shorter)
        assert chunk_tokens(parts) == chunk_tokens(shorter) == 32

    def test_adapter_and_salt_by_hand(self) -> None:
        """The salt is in the first block, the adapter in each, its files in kvtier's own part."""
        seven = xxhash.xxh3_128_digest(b"\x617")
        lora = b"\x83\x64lora\x63sql\x64/sql"
        salt = b"\x82\x6acache_salt\x63you"
        first = b"\x83\x50" + seven + b"\x90" + bytes(range(16)) + b"\x82" + lora + salt
        middle = xxhash.xxh3_128_digest(first)
        second = b"\x83\x50" + middle + b"\x90" + bytes(range(16)) + b"\x81" + lora
        plain = block_key(xxhash.xxh3_128_digest(second))
        facts = FACTS | {"hash": "xxhash_cbor", "hash_seed": "7"}
        prompt = Prompt(list(range(16)) * 2, "you", ("sql", "/sql"), b"files")
        assert chunk_keys(prompt, Namespace(facts=facts, group_bytes=(1,))) == [
            [xxhash.xxh3_128_digest(b"files" + plain) + plain[-4:]]
        ]

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"hash": "sha256"}, "hashes pickles"),
            ({"hash": "xxhash"}, "hashes pickles"),
            ({"hash": "xxhash_cbor"}, "differ in every process"),
            ({"hash": ""}, "no engine"),
            ({"block_tokens": "x"}, "size of a block"),
            ({"context_parallel": "1,x"}, "size of a block"),
            ({"hash": "sha256_cbor prefix_match_unit=0"}, "size of a block"),
            ({"hash": "sha256_cbor prefix_match_unit=64"}, "size of a block"),
            ({"group_tokens": "16,32"}, "blocks of 16,32 tokens: only its engine"),
            ({"hash": "sha256 prefix_match_unit=8"}, "made by sha256, which hashes pickles"),
        ],
    )
    def test_what_cannot_be_computed_is_said(self, change: dict[str, str], says: str) -> None:
        with pytest.raises(KVTierError, match=says):
            chunk_keys(PROMPT, Namespace(facts=FACTS | change, group_bytes=(1,)))
        with pytest.raises(KVTierError, match=says):
            chunk_tokens(Namespace(facts=FACTS | change, group_bytes=(1,)))


class TestPrompts:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("{", "no prompt"),
            ('{"tokens": ["a"]}', "no prompt"),
            ('{"tokens": [-1]}', "out of range"),
            ('{"prompt": 7}', "no prompt"),
            ('{"timestamp": 0, "hash_ids": [1]}', "no prompt, no messages"),
            ('{"prompt": "caf\xe9"}', "no prompt"),
            (f'{{"tokens": [1], "tools": {"[" * 9999}', "no prompt"),
        ],
    )
    def test_bad_lines_are_named(self, tmp_path: Path, text: str, says: str) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text(f'{{"tokens": []}}\n{text}\n', "latin-1")
        with pytest.raises(ConfigError, match=f"p.jsonl:2.*{says}"):
            read_prompts(path, None)

    def test_a_device_is_not_read_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prompts_module, "_BYTES_MAX", 1 << 20)
        with pytest.raises(ConfigError, match="/dev/zero: cannot be read: File too large"):
            read_prompts(Path("/dev/zero"), None)

    def test_a_text_needs_a_tokenizer(self, tmp_path: Path) -> None:
        path = tmp_path / "p.txt"
        path.write_text("hello")
        with pytest.raises(KVTierError, match="--model"):
            read_prompts(path, None)

    def test_what_only_an_engine_can_compute_is_skipped(self, tmp_path: Path) -> None:
        image = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
        text = {"type": "text", "text": "What is this?"}
        rows = [
            {"tokens": [1]},
            {"messages": [{"role": "user", "content": [text, image]}]},
            {"prompt": "a cat", "multi_modal_data": {"image": "cat.png"}},
            {"messages": [{"role": "user", "content": [text, text]}]},
            {"tokens": [2], "lora": {"name": "sql", "path": str(tmp_path / "none")}},
            {"tokens": [3], "tools": []},
            {"tokens": [4], "cache_salt": "you"},
        ]
        path = tmp_path / "p.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        prompts = read_prompts(path, None)
        assert prompts.known == [Prompt([1]), Prompt([4], "you", number=6)]
        expected = ["images", "images", "several parts", "files of its adapter", "tools"]
        for number, (why, said) in enumerate(zip(expected, prompts.skipped, strict=True), 2):
            assert f"p.jsonl:{number} is skipped: " in said
            assert why in said

    def test_an_adapter_is_known_by_its_files(self, tmp_path: Path) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text(json.dumps({"tokens": [1], "lora": {"name": "a", "path": str(tmp_path)}}))
        (tmp_path / "adapter_config.json").write_text("{}")
        (prompt,) = read_prompts(path, None).known
        assert prompt.adapter == ("a", str(tmp_path))
        assert prompt.fingerprint == fingerprint_adapter(tmp_path)


class TestExplain:
    @every_kind
    def test_a_prompt_that_hits_in_part(self, stack_file: Path, prompt_file: Path) -> None:
        store(stack_file, ENGINE, 4)
        report = run("explain", "--prompts", prompt_file, "-c", stack_file)
        (answer,) = report["answers"]
        assert (answer["hits"], answer["chunks"], answer["hit_tokens"]) == (4, 6, 128)
        assert [(each["first"], each["last"]) for each in answer["runs"]] == [(0, 3), (4, 5)]
        assert answer["runs"][1]["tiers"] == []

    def test_in_whose_memory_it_is(self, stack_file: Path, prompt_file: Path) -> None:
        first, second = (keys[0] for keys in chunk_keys(PROMPT, ENGINE)[:2])
        with (
            Stack.open(stack_file, ENGINE, engine="one") as one,
            Stack.open(stack_file, ENGINE, engine="two") as two,
        ):
            for stack, key in ((one, first), (two, second)):
                stack.store({key: payload(key, ENGINE)})
                assert stack.settle()
            report = run("explain", "--prompts", prompt_file, "-c", stack_file, code=1)
            runs = report["answers"][0]["runs"][:2]
            assert [each["tiers"][0] for each in runs] == ["0 cpu of one", "0 cpu of two"]
            assert "of engine two" in command("ls", second.hex(), "-c", stack_file).said

    def test_another_namespace_and_the_fact_that_differs(
        self, stack_file: Path, prompt_file: Path
    ) -> None:
        stack_file.write_text(stack_file.read_text().replace("16MiB", "160MiB"))  # for both
        store(stack_file, OTHER, 6)
        store(stack_file, ENGINE, 0)
        args = ["explain", "--prompts", prompt_file, "-c", stack_file, "--namespace", ENGINE.id]
        report = run(*args, code=1)
        mine, other = report["answers"]
        assert (mine["hits"], mine["differs"]) == (0, [])
        assert other["hits"] == 6
        assert other["differs"] == ["dtype: bfloat16 here, float16 there"]
        assert "differs: dtype" in command(*args).said

    def test_the_model_that_is_named_is_asked_about(
        self, stack_file: Path, prompt_file: Path, tmp_path: Path
    ) -> None:
        make_room(stack_file)
        another = Namespace(facts=FACTS | {"model": "/srv/another"}, group_bytes=(4096, 4096))
        store(stack_file, ENGINE, 4)
        store(stack_file, another, 6)
        (tmp_path / "model").mkdir()
        words = ["explain", "--prompts", prompt_file, "-c", stack_file, "--model"]
        for model, namespace in (
            ("model", ENGINE),
            (tmp_path / "model", ENGINE),
            ("/srv/another/", another),
        ):
            assert run(*words, model)["asked"] == namespace.id
        done = command(*words, "nosuch")
        assert "nothing here is of a model called nosuch" in done.err
        assert done.out

    def test_what_could_not_be_read_is_said_to_programs_too(
        self, stack_file: Path, prompt_file: Path, tmp_path: Path
    ) -> None:
        store(stack_file, ENGINE, 4)
        stray = tmp_path / "disk" / "blocks" / ENGINE.id / "ffffffff.table"
        stray.write_bytes(b"nothing of ours")
        report = run("explain", "--prompts", prompt_file, "-c", stack_file, code=1)
        assert report["answers"][0]["hits"] == 4
        (trouble,) = report["troubles"]
        assert str(stray) in trouble

    def test_a_group_that_is_missing_is_a_miss(self, stack_file: Path, prompt_file: Path) -> None:
        keys = chunk_keys(PROMPT, ENGINE)
        chosen = [*keys[0], keys[1][0]]
        put(stack_file, chosen, ENGINE)
        assert run("explain", "--prompts", prompt_file, "-c", stack_file)["answers"][0]["hits"] == 1

    def test_a_short_prompt(self, stack_file: Path, tmp_path: Path) -> None:
        store(stack_file, ENGINE, 1)
        path = tmp_path / "p.jsonl"
        path.write_text('{"tokens": [1, 2]}')
        done = command("explain", "--prompts", path, "-c", stack_file)
        assert done.code == 1
        assert "shorter than one chunk" in done.said

    @pytest.mark.slow
    def test_skipped_prompts_are_said_and_counted(self, stack_file: Path, tmp_path: Path) -> None:
        store(stack_file, ENGINE, 4)
        path = tmp_path / "p.jsonl"
        image = {"tokens": TOKENS, "multi_modal_data": {}}
        path.write_text(f"{json.dumps(image)}\n{json.dumps({'tokens': TOKENS})}\n")
        done = command("explain", "--prompts", path, "-c", stack_file)
        assert done.code == 0
        assert done.out.startswith("prompt 2, 200 tokens")
        assert "p.jsonl:1 is skipped" in done.err
        assert "1 of 2 prompts are skipped" in done.err
        report = run("explain", "--prompts", path, "-c", stack_file)
        assert (len(report["answers"]), len(report["skipped"])) == (1, 1)


class TestRequests:
    """The command asks an engine in another process: here its socket alone."""

    @pytest.fixture
    def engine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[deque[Miss]]:
        """What an engine of the stack has explained."""
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        known: Any = SimpleNamespace(latest=deque[Miss]())
        answering = MissSocket("cli", known)
        yield known.latest
        answering.close()

    def test_a_request_by_name_or_the_last_one(self, stack_file: Path, engine: deque[Miss]) -> None:
        engine.append(Miss("cmpl-1-0-ab", 1.0, 900, 100, 412, 256, "evicted", "from nvme"))
        engine.append(Miss("cmpl-2-0-cd", 2.0, 900, 0, 768))
        shown = command("explain", "-c", stack_file, "--request", "cmpl-1", columns=300)
        assert shown.out == (
            "request cmpl-1-0-ab: 512 of 900 tokens found (100 by vLLM itself, 412 in the tiers); "
            "256 missed from there on: the last tier that had it needed the room (from nvme)\n"
        )
        last = run("explain", "-c", stack_file, "--request", "last")["misses"]
        assert [(each["request"], each["reason"]) for each in last] == [("cmpl-2-0-cd", "")]

    def test_what_an_engine_does_not_know_is_looked_for_in_other_namespaces(
        self, stack_file: Path, engine: deque[Miss]
    ) -> None:
        store(stack_file, ENGINE, 1)
        store(stack_file, OTHER, 3)
        ((_, key), *_) = chunk_keys(PROMPT, OTHER)[2:]
        named = "not_computed", "", key.hex(), ENGINE.id
        engine.append(Miss("r", 1.0, 200, 0, 64, 128, *named))
        shown = command("explain", "-c", stack_file, "--request", "r", columns=300)
        assert f"  the namespace {OTHER.id[:12]} has it\n    differs: dtype: bfloat16" in shown.out
        (row,) = run("explain", "-c", stack_file, "--request", "r")["misses"]
        assert row["elsewhere"] == {OTHER.id: ["dtype: bfloat16 here, float16 there"]}

    def test_nobody_knows_it(self, stack_file: Path, engine: deque[Miss], tmp_path: Path) -> None:
        asked = command("explain", "-c", stack_file, "--request", "r")
        assert (asked.code, "none of the last 1024 requests" in asked.err) == (1, True)
        other = tmp_path / "other.yaml"
        other.write_text(stack_file.read_text().replace("name: cli", "name: other"))
        asked = command("explain", "-c", other, "--request", "last")
        assert (asked.code, "no engine of the stack 'other' runs" in asked.err) == (1, True)
        for both in ([], ["--request", "r", "--prompts", stack_file]):
            asked = command("explain", "-c", stack_file, *both)
            assert (asked.code, "one of --prompts and --request" in asked.err) == (2, True)


def test_prewarm_of_what_a_prompt_asks_for(
    stack_file: Path, prompt_file: Path, tmp_path: Path
) -> None:
    store(stack_file, ENGINE, 4)
    with Stack.open(stack_file, ENGINE, engine="one") as stack:
        stray = block_key(b"x" * 32)
        stack.store({stray: payload(stray, ENGINE)})
        assert stack.settle()
    target = tmp_path / "target"
    (target / "host").mkdir(parents=True)
    (target / "stack.yaml").write_text(STACK.format(host=target / "host", blocks=target / "blocks"))
    args = ["prewarm", "-c", target / "stack.yaml", "--from", stack_file, "--prompts", prompt_file]
    (report,) = run(*args)["namespaces"]
    assert (report["asked"], report["copied"], report["missing"]) == (8, 8, 4)
    assert (
        run("explain", "--prompts", prompt_file, "-c", target / "stack.yaml")["answers"][0]["hits"]
        == 4
    )


def make_room(stack_file: Path) -> None:
    """For the blocks of two namespaces."""
    stack_file.write_text(stack_file.read_text().replace("16MiB", "1GiB"))


class TestPrewarmWhereKeysCannotBeComputed:
    PICKLED = Namespace(facts=FACTS | {"hash": "sha256"}, group_bytes=(4096, 4096))

    @pytest.fixture
    def args(self, prompt_file: Path, stack_file: Path, tmp_path: Path) -> list[object]:
        """To prewarm from a stack where an engine with such keys has stored blocks."""
        make_room(stack_file)
        with Stack.open(stack_file, self.PICKLED, engine="two") as stack:
            key = block_key(b"x" * 32)
            stack.store({key: payload(key, self.PICKLED)})
            assert stack.settle()
        target = tmp_path / "target"
        (target / "host").mkdir(parents=True)
        path = target / "stack.yaml"
        path.write_text(STACK.format(host=target / "host", blocks=target / "blocks"))
        return ["prewarm", "-c", path, "--from", stack_file, "--prompts", prompt_file]

    @pytest.mark.slow
    def test_that_namespace_is_skipped(self, stack_file: Path, args: list[object]) -> None:
        store(stack_file, ENGINE, 4)
        report = run(*args)
        assert report["ok"]
        found = {each["namespace"]: each for each in report["namespaces"]}
        assert found[ENGINE.id]["copied"] == 8
        assert found[self.PICKLED.id]["copied"] == 0
        assert "hashes pickles" in found[self.PICKLED.id]["skipped"]
        done = command(*args)
        assert (done.code, f"namespace {self.PICKLED.id[:12]} is skipped" in done.err) == (0, True)
        assert done.out.startswith("0 of 8 blocks copied, 8 were there already")

    @pytest.mark.slow
    def test_without_another_one_that_is_a_failure(self, args: list[object]) -> None:
        assert not run(*args, code=1)["ok"]
        done = command(*args)
        assert (done.code, done.out) == (1, "")
        assert "hashes pickles" in done.err

    @pytest.mark.slow
    def test_so_it_is_if_it_was_asked_for(self, stack_file: Path, args: list[object]) -> None:
        store(stack_file, ENGINE, 4)
        done = command(*args, "--namespace", self.PICKLED.id)
        assert done.code == 1
        assert "hashes pickles" in done.err


def test_each_namespace_is_searched_in_its_own_blocks(
    stack_file: Path,
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In those of all, a store in which versions have piled up was gone through for each."""
    with_store(stack_file, tmp_path / "store")
    for number in range(4):
        store(stack_file, Namespace(facts=FACTS | {"dtype": f"{number}"}, group_bytes=(4096,)), 5)
    looked: Counter[str] = Counter()
    parse = store_survey.parse_block

    def count(name: str) -> tuple[str, BlockKey, int] | None:
        looked[name] += 1
        return parse(name)

    for module in (inspector, store_survey):
        monkeypatch.setattr(module, "parse_block", count)
    assert app.run(["explain", "--prompts", str(prompt_file), "-c", str(stack_file), "--json"]) == 0
    assert [each["hits"] for each in json.loads(capsys.readouterr().out)["answers"]] == [5] * 4
    assert max(looked.values()) == 2, "in the listing, and for its own namespace"


def test_of_a_large_store_single_blocks_are_asked_for(
    stack_file: Path, prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack_file.write_text(
        "version: 1\ntiers: [{kind: memory, capacity: 4MiB}, "
        f"{{kind: object, capacity: 64MiB, url: 'file://{tmp_path}/store'}}]\n"
    )
    store(stack_file, Namespace(facts=FACTS, group_bytes=(4096,)), 5)
    listed: list[str] = []
    prefix = inspector.blocks_prefix
    monkeypatch.setattr(
        inspector, "blocks_prefix", lambda *words: listed.append(words[1]) or prefix(*words)
    )
    monkeypatch.setattr(explain, "_LISTED_AT_ONCE", 0)
    assert app.run(["explain", "--prompts", str(prompt_file), "-c", str(stack_file)]) == 0
    assert len(listed) > 1
    assert all(len(key) == 2 * 36 for key in listed)


def test_a_namespace_that_nothing_describes_does_not_stop_the_others(
    stack_file: Path, tmp_path: Path
) -> None:
    make_room(stack_file)
    for namespace, engine in ((ENGINE, "one"), (OTHER, "two")):
        with Stack.open(stack_file, namespace, engine=engine) as stack:
            key = block_key(b"x" * 32)
            stack.store({key: payload(key, namespace)})
            assert stack.settle()
    first, last = sorted([ENGINE.id, OTHER.id])
    for path in tmp_path.rglob("namespace.json"):
        if path.parent.name == first:
            path.write_text("{}")
    store_url = f"file://{tmp_path}/store"
    report = run("snapshot", "-c", stack_file, "--to", store_url, code=1)
    found = {each["namespace"]: each for each in report["namespaces"]}
    assert {name: each["copied"] for name, each in found.items()} == {first: 0, last: 1}
    assert "does not describe this namespace" in found[first]["skipped"]
    assert (report["ok"], len(report["troubles"])) == (False, 1)


def test_a_model_without_a_tokenizer_is_told_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise OSError("not in the cache\nand much more")

    hub = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=missing))
    monkeypatch.setitem(sys.modules, "transformers", hub)
    with pytest.raises(KVTierError, match=r"one with --model \(not in the cache\)$"):
        prompts_module._load_tokenizer("some/model")
