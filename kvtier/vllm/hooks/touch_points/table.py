"""All touch-points. `kvtier doctor --vllm`, the start of an engine and `make vllm-drill` compare
them with the sources of a vLLM (source_check.py); a test compares them with the files of hooks/."""

from __future__ import annotations

from kvtier.vllm.hooks.touch_points.engine import ENGINE
from kvtier.vllm.hooks.touch_points.interfaces import INTERFACES
from kvtier.vllm.hooks.touch_points.offloading import OFFLOADING_SIDES

TOUCH_POINTS = (*INTERFACES, *OFFLOADING_SIDES, *ENGINE)
