"""Why no load ends within the step that uses it (docs/how_it_works/choices.md): if vLLM gives other
answers here, layers could be used as they arrive."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import engines.engine


def test_vllm_hands_on_a_block_whose_synchronous_load_failed(model: Callable[..., Path]) -> None:
    """The first request is told of a bad block, and aborted before it computes that again."""
    script = Path(engines.engine.__file__).with_name("synchronous.py")
    command = [sys.executable, str(script), str(model("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer == {"synchronous": True, "kept": 3, "computed": 1, "bad block is given": True}
