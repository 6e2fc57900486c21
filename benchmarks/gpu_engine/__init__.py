"""vLLM on a GPU with kvtier, beside its own offloading: one unattended run in a few minutes.

    make gpu-engine            # SHORT=1 in under four minutes; DEVICE=cpu tries the program itself

- `__main__`: the stages in the order of their worth, within a limit of time.
- `results`: runs them; what fails is a row with its reason, and what has been done is not repeated.
  Rows are written as JSON as they come, with the table made of them.
- `engine_process`: one engine, told by lines of JSON what to do.
- `engines`: starts such processes, waits for them no longer than allowed, ends them.
- `contestants`: without a connector, kvtier, vLLM's offloading and its tiering with files; the
  model, its prompts and sizes: for a GPU, or small enough for a CPU.
- `competition`: what is measured of each contestant.
- `matrix`: families of models and modes of the engine, and whether tokens are equal in every state.
- `dummy_weights`: vLLM's dummy weights, such that tokens depend on what is in the KV cache.
"""
