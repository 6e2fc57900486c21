"""`host.py`, and looks at single steps: how long they are, and what is scheduled between them."""

from __future__ import annotations

from types import SimpleNamespace

import host


class Paced(host.Host):
    """The same commands, and some for steps."""

    def count_pauses(self) -> None:
        """From now on."""
        from kvtier.vllm import connector

        self._pauses = 0

        def pause(seconds: float) -> None:
            self._pauses += 1

        connector.time = SimpleNamespace(sleep=pause)

    def pauses(self, steps: int = 0) -> int:
        """How often the engine has paused, so many more steps included."""
        for _ in range(steps):
            self._step()
        return self._pauses

    def overlap(self, prompt: list[int]) -> list[list[int]]:
        """Let a step without tokens end while one that computes a prompt is under way, as on CUDA,
        where steps are scheduled ahead, which vLLM does not do on CPUs: the prompt tokens of each
        that the cost model learns of when it ends."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput

        engine, core, costs = self._llm.llm_engine, self._core, self._manager.costs
        learned: list[list[int]] = [[], []]
        now = learned[0]
        costs.observe_prefill = lambda tokens, *_: now.append(tokens)
        empty = core.scheduler.schedule()
        core.model_executor.execute_model(empty)
        engine.add_request("overlapped", {"prompt_token_ids": prompt}, self._greedy(1))
        full = core.scheduler.schedule()
        # Several workers answer so, even if nothing has ended on any of them.
        EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output = KVConnectorOutput()
        core.scheduler.update_from_output(empty, EMPTY_MODEL_RUNNER_OUTPUT)
        EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output = None
        now = learned[1]
        core.model_executor.execute_model(full)
        core.scheduler.update_from_output(full, core.model_executor.sample_tokens(None))
        return learned


if __name__ == "__main__":
    host.main(Paced)
