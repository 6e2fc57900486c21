"""What makes KV bytes interchangeable: under which namespace and which keys they are found again.

- `namespace_facts.py`: the facts of an engine's namespace, from its configuration
- `weight_fingerprints.py`: fingerprints of weights, and of LoRA adapters while they are used
- `prompts.py`: prompts from files, and the keys of prompts, computed without vLLM
"""
