"""`host.py`, and requests of which vLLM's own cache serves some otherwise than others."""

from __future__ import annotations

from typing import Any

import host


class Scored(host.Host):
    """The same commands, and some for prompts that are no tokens, or of which each is looked at."""

    def score(self, prompt: list[int]) -> list[float]:
        """The log-probability of each of a prompt's tokens but the first."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, prompt_logprobs=1)
        (found,) = self._llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        scores = found.prompt_logprobs
        return [scores[at][token].logprob for at, token in enumerate(prompt) if at]

    def weigh(self, prompt: list[int], tokens: int = 16) -> dict[str, Any]:
        """A greedy continuation, and by how much the best token beat the next one at each place."""
        parameters = self._greedy(tokens)
        parameters.logprobs = 2
        (found,) = self._llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        best = [sorted(each.logprob for each in at.values()) for at in found.outputs[0].logprobs]
        return {**host._shown(found), "margins": [each[-1] - each[-2] for each in best]}

    def continue_embeddings(self, seed: int, length: int) -> dict[str, Any]:
        """A greedy continuation of vectors that stand for no tokens."""
        import torch

        size = self._llm.llm_engine.model_config.get_hidden_size()
        chance = torch.Generator().manual_seed(seed)
        vectors = torch.randn(length, size, generator=chance) / 20
        (found,) = self._llm.generate(
            [{"prompt_embeds": vectors}], self._greedy(16), use_tqdm=False
        )
        return host._shown(found)


if __name__ == "__main__":
    host.main(Scored)
