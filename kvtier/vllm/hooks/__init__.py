"""The border to vLLM: all that touches what vLLM does not promise, one file a class of vLLM's.

Private attributes, wrapped methods, internal functions and base classes of vLLM's are met here and
nowhere else (tests/unit/test_layers.py), and stand in one table.

- `touch_points.py`: the table
- `versions.py`: which vLLM is installed, and whether it can be served: the table, compared with its
  sources
- `interfaces.py`: the classes that kvtier's own derive from, and the types that they use
- `tiering.py`: what a secondary tier of vLLM's own tiering derives from
- `config.py`: what an engine is configured with, and how its connectors are constructed
- `cache_groups.py`: the sizes of blocks and chunks, and what vLLM's side is told of them
- `scheduler.py`: the scheduler's side of vLLM's connector, and its state of each request
- `idle_requests.py`: which requests need not be looked through in a step
- `block_pool.py`: which blocks a step gives out to be written to
- `worker.py`: the worker's side of vLLM's connector, of which a transfer may fail
- `engine.py`: calls of the engine's core that no connector hears of, and how an engine ends
"""
