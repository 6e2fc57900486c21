"""kvtier inside vLLM: `--kv-transfer-config` names this module and `KVTierConnector`.

Importing this package imports neither vLLM nor torch; asking for the connector imports both.

- `connector.py`: the class that vLLM loads; `spec.py`: what vLLM builds behind it, in its words
- `settings.py`: what `--kv-transfer-config` says, and what is settled before vLLM's connector is
  constructed; `unsupported_modes.py`: what an engine cannot do
- `hooks/`: the border to vLLM, where all that it does not promise is touched
- `manager.py`: what is found, loaded and stored; `requests.py`, `deferrals.py`, `engine_load.py`,
  `hints.py` and `waiting_prefetches.py`: what it knows of requests and of the engine
- `worker.py`: the copies of one rank; `protocol.py`: what manager and workers tell each other
- `metrics.py` and `events.py`: what is told of it
- `misses.py`, `other_namespaces.py`, `miss_socket.py`: why requests found no more, and who asks
- `identity/`: namespaces, keys and fingerprints
- `secondary.py`: a stack below vLLM's own CPU tier, without the connector
- `plugin.py`: what vLLM runs before it reads its settings
- `server_process.py` and `tiny_model.py`: a server and a small model, for the command line
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KVTierConnector":
        from kvtier.vllm.connector import KVTierConnector

        return KVTierConnector
    raise AttributeError(f"module 'kvtier.vllm' has no attribute {name!r}")
