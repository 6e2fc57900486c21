"""What makes KV bytes interchangeable: under which namespace and which keys they are found again.

- `namespace_facts.py`: the facts of an engine's namespace, from its configuration
- `lora_adapters.py`: which adapters an engine uses, and whether their files are what they were
- `prompts.py`: prompts from files, and the keys of prompts, computed without vLLM
"""
