"""LoRA adapters for the small model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ADAPTER = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
folder, seed, hidden, layers = Path(sys.argv[1]), int(sys.argv[2]), 256, 4
folder.mkdir(exist_ok=True)
torch.manual_seed(seed)
tensors = {}
for layer in range(layers):
    base = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
    tensors[f"{base}.lora_A.weight"] = torch.randn(8, hidden)
    tensors[f"{base}.lora_B.weight"] = torch.randn(hidden, 8)
save_file(tensors, folder / "adapter_model.safetensors")
config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"],
          "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "x"}
(folder / "adapter_config.json").write_text(json.dumps(config))
"""


def make_adapter(folder: Path, seed: int) -> None:
    """Write an adapter with random weights; another seed, other weights."""
    subprocess.run([sys.executable, "-c", ADAPTER, str(folder), str(seed)], check=True)
