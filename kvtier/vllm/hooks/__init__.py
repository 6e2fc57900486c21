"""The border to vLLM: all that touches what vLLM does not promise, one file a purpose.

Private attributes, methods that are wrapped, functions of its inside and classes that are derived
from are met here and nowhere else (tests/unit/test_layers.py), and stand in one table.

- `touch_points/`: the table, and its comparison with the sources of a vLLM
- `versions.py`: which vLLM is installed, and whether it can be served
- `interfaces.py`: the classes that kvtier's own derive from, or speak in
- `construction.py`: what an engine is configured with for its connector, and for one above it
- `embedding_inputs.py`: whether clients may send embeddings in place of images
- `cache_groups.py`: the sizes of blocks and chunks, and what vLLM's side is told of them
- `pipeline_layers.py`: how the ranks of a pipeline share layers out
- `request_states.py`: what vLLM's side knows of each request
- `waiting_queue.py`: what is known of a request that waits for its turn
- `request_hints.py`: what came with a request about the use of its blocks
- `scheduler_steps.py`: what vLLM's side is told of a step
- `block_allocation.py`: which blocks a step gives out to be written to
- `idle_requests.py`: which requests need not be looked through in a step
- `event_tracker.py`: the place of vLLM's tracker of events
- `failure_tolerant_worker.py`: vLLM's worker, of which a transfer may fail
- `engine_calls.py`: what the engine's core is told, and tells no connector
- `engine_endings.py`: an engine that is told to end does so in order, and one that its caller steps
  comes to rest
- `orphaned_engine.py`: an engine whose server was killed ends as well
"""
