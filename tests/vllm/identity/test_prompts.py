"""Keys and tokens of prompts are those of a real engine: prewarm and explain tell the truth."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines.adapter import make_adapter
from engines.world import World, prompt
from hypothesis import given
from hypothesis import strategies as st

from kvtier.types import Namespace
from kvtier.vllm.identity.prompts import Prompt, chunk_keys, read_prompts

TEXT = "What a cache is good for, and for whom. " * 40
TOKENS = prompt(3, 1100)


def kvtier(*args: object) -> Any:
    program = Path(sys.executable).with_name("kvtier")
    done = subprocess.run(
        [program, *map(str, args), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_an_engine_stored_is_found(
    world: World, model: Callable[..., Path], family: str
) -> None:
    folder = model(family)
    stack = world.stack()
    prompts = world.folder / "prompts.jsonl"
    messages = [{"role": "user", "content": TEXT}]
    lines = [{"tokens": TOKENS}, {"prompt": TEXT}, {"messages": messages}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens = [each.tokens for each in read_prompts(prompts, str(folder)).known]
    with world.engine(folder, stack=stack, prefix_caching_hash_algo="sha256_cbor") as engine:
        engine.generate(prompts=tokens)
        engine.settle()
    source = world.folder / "stack.yaml"
    source.write_text(yaml.safe_dump(stack))
    answers = kvtier("explain", "--prompts", prompts, "-c", source, "--model", folder)["answers"]
    for answer in answers:
        assert answer["hits"] == answer["chunks"] > 0

    fresh = stack | {"name": "fresh", "tiers": [dict(tier) for tier in stack["tiers"]]}
    fresh["tiers"][1]["path"] = str(world.folder / "fresh")
    target = world.folder / "fresh.yaml"
    target.write_text(yaml.safe_dump(fresh))
    args = ["--from", source, "--prompts", prompts, "--model", folder]
    (report,) = kvtier("prewarm", "-c", target, *args)["namespaces"]
    if family == "llama":  # of windowed layers, only the last chunks are stored
        assert report["missing"] == 0
    assert report["copied"] == report["asked"] > 0
    with world.engine(folder, stack=fresh, prefix_caching_hash_algo="sha256_cbor") as engine:
        (first,) = engine.generate(prompts=[tokens[0]])
    assert first["cached"] == 1024, "the very first request of a fresh engine hits"


_WITHOUT_AN_ENGINE = """
import json, sys
from pathlib import Path
from kvtier.vllm.identity.prompts import read_prompts
found = read_prompts(Path(sys.argv[1]), sys.argv[2]).known
assert "torch" not in sys.modules and "vllm" not in sys.modules
import torch  # which is hidden no longer
print(json.dumps([each.tokens for each in found]))
"""


def test_a_tokenizer_is_loaded_without_torch(tmp_path: Path, model: Callable[..., Path]) -> None:
    """Whose import takes longer than all else that `explain` does."""
    prompts, folder = tmp_path / "prompts.jsonl", model("llama")
    lines = [{"prompt": TEXT}, {"messages": [{"role": "user", "content": TEXT}]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_AN_ENGINE, prompts, folder], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rendered = tokenizer.apply_chat_template(
        lines[1]["messages"], tokenize=False, add_generation_prompt=True
    )
    wanted = [tokenizer.encode(TEXT), tokenizer.encode(rendered, add_special_tokens=False)]
    assert json.loads(done.stdout) == wanted


def test_salts_and_adapters_are_in_the_keys(world: World, model: Callable[..., Path]) -> None:
    adapter = world.folder / "adapter"
    make_adapter(adapter, 1)
    stack = world.stack()
    options = {"enable_lora": True, "max_lora_rank": 8, "prefix_caching_hash_algo": "sha256_cbor"}
    salted, tuned, plain = (prompt(seed, 1100) for seed in (1, 2, 3))
    named = {"adapter": ["tuned", 1, str(adapter)]}
    with world.engine(model("llama"), stack=stack, **options) as engine:
        engine.generate(prompts=[salted], more=[{"cache_salt": "yours", **named}])
        engine.generate(prompts=[tuned], more=[named])
        engine.generate(prompts=[plain])  # without an adapter nothing is kept on a CPU
        engine.settle()
    source = world.folder / "stack.yaml"
    source.write_text(yaml.safe_dump(stack))
    lora = {"name": "tuned", "path": str(adapter)}
    lines: list[tuple[dict[str, Any], int]] = [
        ({"tokens": salted, "cache_salt": "yours", "lora": lora}, 4),
        ({"tokens": salted, "cache_salt": "mine", "lora": lora}, 0),
        ({"tokens": salted, "lora": lora}, 0),
        ({"tokens": tuned, "lora": lora}, 4),
        ({"tokens": tuned, "lora": {**lora, "name": "other"}}, 0),
        ({"tokens": tuned}, 0),
        ({"tokens": plain}, 0),
    ]
    prompts = world.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line, _ in lines))
    answers = kvtier("explain", "--prompts", prompts, "-c", source)["answers"]
    assert [answer["hits"] for answer in answers] == [hits for _, hits in lines]


def test_what_a_chat_template_refuses_is_skipped(
    tmp_path: Path, model: Callable[..., Path]
) -> None:
    """The template is the model's own program: whatever it says of messages is no mistake here."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": []}\n{"messages": [{"role": "user", "content": "hello"}]}\n')
    found = read_prompts(prompts, str(model("llama")))
    assert [each.number for each in found.known] == [1]
    assert "prompts.jsonl:1 is skipped: the model's chat template" in found.skipped[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when vLLM is imported here
@given(
    tokens=st.lists(st.integers(0, 1 << 31), min_size=8, max_size=24),
    salt=st.text(max_size=40),
    adapter=st.none() | st.tuples(st.text(min_size=1, max_size=300), st.text(max_size=30)),
    seed=st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=40),
    algorithm=st.sampled_from(["sha256_cbor", "xxhash_cbor"]),
)
def test_hashes_are_vllms(
    tokens: list[int], salt: str, adapter: tuple[str, str] | None, seed: str, algorithm: str
) -> None:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils as vllm

    function = get_hash_fn_by_name(algorithm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", seed)
        vllm.init_none_hash(function)
    parent, expected = None, []
    for start in range(0, len(tokens) - 7, 8):
        extras = [("lora", *adapter)] if adapter else []
        extras += [("cache_salt", salt)] if salt and not start else []
        block = tokens[start : start + 8]
        parent = vllm.hash_block_tokens(function, parent, block, tuple(extras) or None)
        expected.append(bytes(parent) + bytes(4))
    facts = {"hash": algorithm, "hash_seed": seed, "block_tokens": "8", "chunk_blocks": "1"}
    found = chunk_keys(Prompt(tokens, salt, adapter), Namespace(facts=facts, group_bytes=(1,)))
    assert [bytes(key) for (key,) in found] == expected
