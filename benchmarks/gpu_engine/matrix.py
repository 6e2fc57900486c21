"""Families of models and modes of the engine: whether tokens are equal in every state.

Small models with kvtier, several at once. Each is asked the same prompts cold, when they are in CPU
memory, after kill -9, and when they are on the disk alone.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from engines.adapter import make_adapter
from engines.engine import connector

from benchmarks.gpu_engine import contestants
from benchmarks.gpu_engine.competition import Tokens, equal
from benchmarks.gpu_engine.contestants import Places, Scale
from benchmarks.gpu_engine.engines import Engine, EngineFailed
from benchmarks.gpu_engine.results import Deadline, Results, Row

STAGE = "matrix"
PROMPTS = [(seed, length) for seed, length in enumerate((1500, 900, 1500, 700, 1300, 1500))]
TOKENS = 16


class Case(msgspec.Struct, frozen=True):
    """One kind of engine."""

    name: str
    family: str = "llama"
    arguments: dict[str, Any] = {}
    together: bool = False
    naps: bool = False
    adapter: bool = False
    on_cpu: bool = False
    """It can be tried there, too."""


NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
CASES = [
    Case("windows (Gemma 3)", "gemma3", on_cpu=True),
    Case("latent attention (DeepSeek V2)", "deepseek_v2"),
    Case("states beside attention (Qwen3-Next)", "qwen3_next"),
    Case("fp8 KV cache", arguments={"kv_cache_dtype": "fp8"}),
    Case("full attention (Llama)", on_cpu=True),
    Case("Triton attention", arguments={"attention_backend": "TRITON_ATTN"}),
    Case("preemption", arguments={"num_gpu_blocks_override": 160}, together=True, on_cpu=True),
    Case("speculative decoding", arguments={"speculative_config": NGRAMS}),
    Case("adapters (LoRA)", arguments={"enable_lora": True, "max_lora_rank": 8}, adapter=True),
    Case("sleep", arguments={"enable_sleep_mode": True}, naps=True),
    Case("experts, windows (gpt-oss)", "gpt_oss"),
    Case("FlashInfer attention", arguments={"attention_backend": "FLASHINFER"}),
    Case("without CUDA graphs", arguments={"enforce_eager": True, "compilation_config": {}}),
]
SHORT_CASES = 4
"""The first of them, where time is short."""


class Matrix:
    """Runs cases."""

    def __init__(self, scale: Scale, folder: Path, memory: Path, results: Results) -> None:
        self._scale = scale
        self._folder = folder
        self._memory = memory
        self._results = results

    def run(self, cases: list[Case], deadline: Deadline) -> None:
        """All of them, several at once; raises EngineFailed if one was not whole."""
        with ThreadPoolExecutor(self._scale.at_once) as pool:
            whole = list(pool.map(lambda case: self._guarded(case, deadline), cases))
        if not all(whole):
            raise EngineFailed(f"{whole.count(False)} of {len(whole)} cases were not whole")

    def _guarded(self, case: Case, deadline: Deadline) -> bool:
        name = "".join(letter if letter.isalnum() else "-" for letter in case.name)
        places = Places(self._folder / name, self._memory.with_name(f"{self._memory.name}-{name}"))
        try:
            self._case(case, places, deadline)
        except Exception as error:  # noqa: BLE001 - a case that cannot run says so in its row
            reason = str(error) or type(error).__name__
            self._results.add(Row(stage=STAGE, engine=case.name, what="", failed=reason))
            return False
        finally:
            places.close()
        return True

    def _case(self, case: Case, places: Places, deadline: Deadline) -> None:
        model = contestants.make_model(places.folder / "model", case.family)
        adapter = None
        if case.adapter:
            adapter = str(places.folder / "adapter")
            make_adapter(Path(adapter), 1)
        known: Tokens = {}
        with self._start(case, model, places) as engine:
            engine.ready(deadline.left(self._scale.start_s))
            self._ask(case, engine, deadline, known, "cold", adapter)
            time.sleep(min(1.0, deadline.left()))
            self._ask(case, engine, deadline, known, "the engine's own cache", adapter)
            if case.naps:
                engine.ask(deadline.left(30.0), "nap")
            engine.ask(deadline.left(30.0), "forget")
            self._ask(case, engine, deadline, known, "CPU memory", adapter)
            time.sleep(min(1.0, deadline.left()))
        with self._start(case, model, places) as engine:
            engine.ready(deadline.left(self._scale.start_s))
            self._ask(case, engine, deadline, known, "after kill -9", adapter)
        places.forget_memory()
        with self._start(case, model, places) as engine:
            engine.ready(deadline.left(self._scale.start_s))
            self._ask(case, engine, deadline, known, "disk alone", adapter)

    def _start(self, case: Case, model: Path, places: Places) -> Engine:
        scale = self._scale
        stack = contestants.stack(
            places, 256 << 20, 1 << 30, loads="always", chunk_tokens=256, sleep="keep"
        )
        usual = {
            "model": str(model),
            "kv_cache_memory_bytes": 1 << 28,
            "max_num_batched_tokens": 1024,
            "kv_transfer_config": connector(stack),
        }
        arguments = scale.engine | usual | self._room() | case.arguments
        log = places.folder / "engine.log"
        return Engine(case.name, log, arguments, 258, scale.environment)

    def _room(self) -> dict[str, Any]:
        """Several small engines on one device."""
        small: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 32}
        return small | ({"gpu_memory_utilization": 0.1} if self._scale.device == "cuda" else {})

    def _ask(
        self,
        case: Case,
        engine: Engine,
        deadline: Deadline,
        known: Tokens,
        state: str,
        adapter: str | None,
    ) -> None:
        before = self._found(engine, deadline)
        asked = engine.ask(
            deadline.left(),
            "generate",
            prompts=PROMPTS,
            tokens=TOKENS,
            together=case.together,
            adapter=adapter,
        )
        answers = asked["answers"]
        after = self._found(engine, deadline)
        self._results.add(
            Row(
                stage=STAGE,
                engine=case.name,
                what=state,
                values=[answer["times"][0] * 1e3 for answer in answers],
                unit="ms",
                cached=[answer["cached"] for answer in answers],
                equal=equal(known, PROMPTS, answers),
                more={name: after[name] - before.get(name, 0.0) for name in after},
            )
        )

    @staticmethod
    def _found(engine: Engine, deadline: Deadline) -> dict[str, float]:
        """Blocks found so far, by tier."""
        counted = engine.ask(deadline.left(30.0), "counters")["counters"]
        prefix = "hit_blocks_total "
        return {
            name.removeprefix(prefix): value
            for name, value in counted.items()
            if name.startswith(prefix)
        }
