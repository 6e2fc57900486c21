"""Build a small model with random weights that vLLM serves: no download, the same bytes each time.

Its text is noise, but its attention is real: the next token depends on every token before it, so
a wrong byte of KV cache changes the output. Used by tests, benchmarks and the first run.

    python -m kvtier.vllm.tiny_model FOLDER --layers 16 --hidden 1024

Needs torch, transformers and tokenizers, all of which come with vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import ConfigError

BOS, EOS = "<s>", "</s>"
# One token for every byte and the first two above: any text is its UTF-8 bytes, one token each.
VOCABULARY_SIZE = 256 + 2
MAX_TOKENS = 32768
HEAD_DIM = 64
# Wider than the usual 0.02: with that, random attention is so flat that the output hardly
# depends on the context, and a test would not notice wrong KV.
INITIALIZER_RANGE = 0.08
DESCRIPTION_FILE = "tiny_model.json"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def common(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": max(1, hidden // HEAD_DIM // 2),
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": VOCABULARY_SIZE - 2,
        "eos_token_id": VOCABULARY_SIZE - 1,
        "pad_token_id": VOCABULARY_SIZE - 1,
        "tie_word_embeddings": False,
    }


def _llama(layers: int, hidden: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**common(layers, hidden))


class Family(NamedTuple):
    """Models of one architecture."""

    config: Callable[[int, int], Any]
    """Makes its configuration, of so many layers and so large a hidden state."""
    save_inputs: Callable[[Path], None]
    """Writes what makes tokens of a prompt."""
    loaded_by: str = "AutoModelForCausalLM"
    """The class of transformers' that makes a model of the configuration."""


def save_tokenizer(folder: Path) -> None:
    """A token for each byte."""
    tokenizer().save_pretrained(folder)


FAMILIES = {"llama": Family(_llama, save_tokenizer)}
"""Tests add others (tests/engines/families.py)."""


def build(
    folder: str | os.PathLike[str],
    family: str = "llama",
    layers: int = 4,
    hidden: int = 256,
    seed: int = 0,
) -> Path:
    """Write configuration, weights and tokenizer to `folder`; return it.

    The folder appears whole or not at all. One that already holds this very model is kept, one
    that holds anything else is refused.
    """
    _check(family, layers, hidden)
    target = Path(folder)
    description = {"family": family, "layers": layers, "hidden": hidden, "seed": seed}
    if target.exists() and _is_built(target, description):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        chosen = FAMILIES[family]
        _save_weights(building, chosen.config(layers, hidden), seed, chosen.loaded_by)
        chosen.save_inputs(building)
        (building / DESCRIPTION_FILE).write_text(json.dumps(description) + "\n")
        try:
            building.rename(target)
        except OSError:  # another process was quicker, perhaps
            if not (target.exists() and _is_built(target, description)):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _check(family: str, layers: int, hidden: int) -> None:
    if family not in FAMILIES:
        raise ConfigError("family", f"unknown {family!r}", f"choose one of {', '.join(FAMILIES)}")
    if layers < 1:
        raise ConfigError("layers", f"{layers} is too few", "take at least 1")
    if hidden < 2 * HEAD_DIM or hidden % (2 * HEAD_DIM):
        raise ConfigError("hidden", f"{hidden} does not fit", f"a multiple of {2 * HEAD_DIM} does")


def _is_built(target: Path, description: dict[str, Any]) -> bool:
    """True when the model is there, False when the folder is empty."""
    if not any(target.iterdir()):
        return False
    try:
        found = json.loads((target / DESCRIPTION_FILE).read_text())
    except (OSError, ValueError):
        found = None
    if found != description:
        raise ConfigError(
            str(target),
            f"holds {found or 'something else'}, not {description}",
            "name another folder or remove this one",
        )
    return True


def _save_weights(folder: Path, config: Any, seed: int, loaded_by: str) -> None:
    import torch
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kind = getattr(transformers, loaded_by)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def tokenizer(*more: str) -> Any:
    """A token for each byte, for beginning and end, and for what else is named."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*letters, BOS, EOS, *more])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    if more:
        fast.add_special_tokens({"additional_special_tokens": list(more)})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=list(FAMILIES), default="llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        print(build(**vars(options)))
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
