"""A connector that says it has the beginning of the first prompt, loads nothing, and owns up to it
when the step is over."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

PROMISED = 512


class Missing(KVConnectorMetadata):
    """Blocks that were not loaded."""

    def __init__(self, blocks: set[int]) -> None:
        self.blocks = blocks


class Forgetful(KVConnectorBase_V1, SupportsHMA):
    """Loads before the step, as some do, and not between two."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._asked = False
        self._missing: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        asked, self._asked = self._asked, True
        return (0 if asked else PROMISED), False

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        size = self._vllm_config.cache_config.block_size
        self._missing = set(blocks.get_block_ids()[0][: tokens // size])

    def build_connector_meta(self, scheduled: Any) -> Missing:
        missing, self._missing = self._missing, set()
        return Missing(missing)

    def request_finished_all_groups(self, request: Any, blocks: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, context: Any, **_: Any) -> None:
        self._missing |= self._get_connector_metadata().blocks

    def get_block_ids_with_load_errors(self) -> set[int]:
        missing, self._missing = self._missing, set()
        return missing

    def wait_for_layer_load(self, layer: str) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None: ...
