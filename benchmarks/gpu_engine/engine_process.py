"""One vLLM engine, told by lines of JSON what to do; it answers each with a line of JSON.

Its core is a process of its own, as in a server. What vLLM prints goes to the log.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import time
from typing import Any, TextIO

import numpy as np

STARTED = time.time()


class Served:
    """An engine and what may be asked of it: the methods, by name."""

    def __init__(self, engine: Any, vocabulary: int) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._requests = 0

    async def generate(
        self,
        prompts: list[tuple[int, int]],
        tokens: int,
        together: bool = False,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """Answer prompts (a seed and a length each), all at once or one after the other."""
        began = time.perf_counter()
        asked = [self._one(self._prompt(*each), tokens, adapter) for each in prompts]
        if together:
            answers = list(await asyncio.gather(*asked))
        else:
            answers = [await each for each in asked]
        return {"seconds": time.perf_counter() - began, "answers": answers}

    def _prompt(self, seed: int, length: int) -> list[int]:
        made: list[int] = np.random.RandomState(seed).randint(10, self._vocabulary, length).tolist()
        return made

    async def _one(self, prompt: list[int], tokens: int, adapter: str | None) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        limits = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._requests += 1
        more = {"lora_request": LoRARequest("adapter", 1, adapter)} if adapter else {}
        began, times, found, cached = time.perf_counter(), [], [], 0
        async for output in self._engine.generate(
            {"prompt_token_ids": prompt}, limits, request_id=f"r{self._requests}", **more
        ):
            if new := list(output.outputs[0].token_ids):
                times.append(time.perf_counter() - began)
                found += new
            cached = max(cached, output.num_cached_tokens or 0)
        return {"times": times, "tokens": found, "cached": cached}

    async def forget(self) -> dict[str, Any]:
        """Clear the engine's own cache; what is outside of it stays."""
        return {"done": await self._engine.reset_prefix_cache()}

    async def nap(self) -> dict[str, Any]:
        """Sleep, and wake up."""
        await self._engine.sleep(level=1)
        await self._engine.wake_up()
        return {"done": True}

    async def counters(self) -> dict[str, Any]:
        """kvtier's, by name and label; those that count by rank or reason are added up."""
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                if sample.name.startswith("kvtier") and sample.name.endswith("_total"):
                    tier = sample.labels.get("tier", sample.labels.get("link", ""))
                    name = f"{sample.name.removeprefix('kvtier:')} {tier}".strip()
                    found[name] = found.get(name, 0.0) + sample.value
        return {"counters": found}

    async def stop(self) -> dict[str, Any]:
        """End in order."""
        began = time.perf_counter()
        self._engine.shutdown(timeout=30)
        return {"seconds": time.perf_counter() - began}


async def serve(wanted: dict[str, Any], answers: TextIO) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    imported = time.time()
    if current_platform.is_cpu():
        _fork_core()
    arguments = AsyncEngineArgs(
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor",
        **wanted["arguments"],
    )
    engine = AsyncLLM.from_engine_args(arguments)
    served, now = Served(engine, wanted["vocabulary"]), time.time()
    config = engine.vllm_config
    told = {
        "ready": now - STARTED,
        "imports": imported - STARTED,
        "blocks": config.cache_config.num_gpu_blocks,
        "runner": 2 if config.use_v2_model_runner else 1,
    }
    print(json.dumps(told), file=answers, flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        what = command.pop("do")
        try:
            answer = await getattr(served, what)(**command)
        except Exception as error:  # noqa: BLE001 - whoever asked is told, and goes on
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=answers, flush=True)
        if what == "stop":
            return


def _fork_core() -> None:
    """As vLLM does for a GPU; for a CPU it starts the process anew, which imports all again."""
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(serve(json.loads(sys.argv[1]), answers))


if __name__ == "__main__":
    main()
