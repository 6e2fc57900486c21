"""Build a small model with random weights that vLLM serves: no download, the same bytes each time.

Its text is noise, but its attention is real: the next token depends on every token before it, so
a wrong byte of KV cache changes the output. Used by tests, benchmarks and the first run.

    python -m kvtier.vllm.serving.tiny_model FOLDER --family llama --layers 16 --hidden 1024

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
from typing import Any

from kvtier.errors import ConfigError

BOS, EOS, IMAGE = "<s>", "</s>", "<image>"
# One token for every byte and the first two above: any text is its UTF-8 bytes, one token each.
VOCABULARY_SIZE = 256 + 2
MAX_TOKENS = 32768
HEAD_DIM = 64
IMAGE_PIXELS, IMAGE_TOKENS = 56, 8
# Wider than the usual 0.02: with that, random attention is so flat that the output hardly
# depends on the context, and a test would not notice wrong KV.
INITIALIZER_RANGE = 0.08
DESCRIPTION_FILE = "tiny_model.json"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _common(layers: int, hidden: int) -> dict[str, Any]:
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

    return LlamaConfig(**_common(layers, hidden))


def _gemma3(layers: int, hidden: int) -> Any:
    """Every second layer sees a sliding window of 256 tokens only."""
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
    return Gemma3TextConfig(
        **_common(layers, hidden),
        sliding_window=256,
        layer_types=kinds,
        query_pre_attn_scalar=HEAD_DIM,
    )


def _gpt_oss(layers: int, hidden: int) -> Any:
    """Sliding and full attention in turn, attention sinks, mixture of experts."""
    from transformers import GptOssConfig

    kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
    common = _common(layers, hidden)
    common["max_position_embeddings"] = 131072  # what its default RoPE scaling is made for
    return GptOssConfig(
        **common,
        sliding_window=128,
        layer_types=kinds,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


def _deepseek_v2(layers: int, hidden: int) -> Any:
    """Multi-head latent attention: one compressed vector a token instead of keys and values."""
    from transformers import DeepseekV2Config

    common = _common(layers, hidden)
    heads = common.pop("num_attention_heads")
    for name in ("head_dim", "num_key_value_heads"):
        del common[name]
    return DeepseekV2Config(
        **common,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=hidden,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
    )


def _qwen3_next(layers: int, hidden: int) -> Any:
    """Three layers of gated delta net (a recurrent state) for each layer of attention."""
    from transformers import Qwen3NextConfig

    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    return Qwen3NextConfig(
        **_common(layers, hidden),
        layer_types=kinds,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=hidden,
        shared_expert_intermediate_size=hidden,
    )


def _blip2(layers: int, hidden: int) -> Any:
    """Sees: an image becomes eight tokens before the text. No part of it needs torchvision."""
    from transformers import Blip2Config

    sight = {
        "hidden_size": HEAD_DIM,
        "intermediate_size": 2 * HEAD_DIM,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": INITIALIZER_RANGE,
    }
    common = _common(layers, hidden)
    language = {
        "model_type": "opt",
        "vocab_size": VOCABULARY_SIZE + 1,
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "num_hidden_layers": layers,
        "ffn_dim": common["intermediate_size"],
        "num_attention_heads": common["num_attention_heads"],
        "max_position_embeddings": 4096,  # of which each has weights
        "init_std": INITIALIZER_RANGE,
        **{name: common[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    return Blip2Config(
        vision_config={**sight, "image_size": IMAGE_PIXELS, "patch_size": 14},
        qformer_config={**sight, "vocab_size": 1, "encoder_hidden_size": HEAD_DIM},
        text_config=language,
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=VOCABULARY_SIZE,
        image_text_hidden_size=HEAD_DIM,
    )


def _hrm_text(layers: int, hidden: int) -> Any:
    """All tokens of a prompt see each other, the later ones too."""
    from transformers import HrmTextConfig

    common = _common(layers, hidden)
    del common["num_key_value_heads"]
    return HrmTextConfig(**common | {"num_hidden_layers": 1}, H_cycles=1, L_cycles=layers)


FAMILIES: dict[str, Callable[[int, int], Any]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "qwen3_next": _qwen3_next,
    "blip2": _blip2,
    "hrm_text": _hrm_text,
}


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
        _save_weights(building, FAMILIES[family](layers, hidden), seed)
        if family == "blip2":
            _save_processor(building)
        else:
            _tokenizer().save_pretrained(building)
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


def _save_weights(folder: Path, config: Any, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def _tokenizer(*more: str) -> Any:
    """A token for each byte, for beginning and end, and for what else is named."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*letters, BOS, EOS, *more])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
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


def _save_processor(folder: Path) -> None:
    """The tokenizer, and what makes pixels of images."""
    from transformers import Blip2Processor
    from transformers.models.blip import BlipImageProcessorPil

    pixels = BlipImageProcessorPil(size={"height": IMAGE_PIXELS, "width": IMAGE_PIXELS})
    processor = Blip2Processor(pixels, _tokenizer(IMAGE), num_query_tokens=IMAGE_TOKENS)
    processor.save_pretrained(folder)


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
