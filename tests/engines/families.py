"""Small models of other architectures than the product's own, for tests on real engines.

python families.py FOLDER --family gemma3
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtier.vllm import tiny_model
from kvtier.vllm.tiny_model import Family, save_tokenizer

AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
MLA_DTYPE = "bfloat16" if AMX else "float32"
"""With AMX vLLM's MLA for CPUs takes no weights of float32."""
IMAGE = "<image>"
IMAGE_PIXELS, IMAGE_TOKENS = 56, 8


def _gemma3(layers: int, hidden: int) -> Any:
    """Every second layer sees a sliding window of 256 tokens only."""
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
    return Gemma3TextConfig(
        **tiny_model.common(layers, hidden),
        sliding_window=256,
        layer_types=kinds,
        query_pre_attn_scalar=tiny_model.HEAD_DIM,
    )


def _gpt_oss(layers: int, hidden: int) -> Any:
    """Sliding and full attention in turn, attention sinks, mixture of experts."""
    from transformers import GptOssConfig

    kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
    common = tiny_model.common(layers, hidden)
    common["max_position_embeddings"] = 131072  # what its default RoPE scaling is made for
    return GptOssConfig(
        **common,
        sliding_window=128,
        layer_types=kinds,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


def _one_kv_head(layers: int, hidden: int) -> Any:
    """A Llama of which every rank has the same keys and values."""
    from transformers import LlamaConfig

    return LlamaConfig(**tiny_model.common(layers, hidden) | {"num_key_value_heads": 1})


def _four_kv_heads(layers: int, hidden: int) -> Any:
    """A Llama that four ranks can divide."""
    from transformers import LlamaConfig

    return LlamaConfig(**tiny_model.common(layers, hidden) | {"num_key_value_heads": 4})


def _deepseek_v2(layers: int, hidden: int) -> Any:
    """Multi-head latent attention: one compressed vector a token instead of keys and values."""
    from transformers import DeepseekV2Config

    common = tiny_model.common(layers, hidden)
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
        **tiny_model.common(layers, hidden),
        layer_types=kinds,
        full_attention_interval=4,  # SGLang's word for these kinds
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=hidden,
        shared_expert_intermediate_size=hidden,
    )


def _mellum(layers: int, hidden: int) -> Any:
    """As Gemma 3, every second layer sees a window; no mixture of experts here."""
    from transformers import MellumConfig

    kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
    return MellumConfig(
        **tiny_model.common(layers, hidden),
        sliding_window=128,
        layer_types=kinds,
        mlp_layer_types=["dense"] * layers,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=hidden,
    )


def _blip2(layers: int, hidden: int) -> Any:
    """Sees: an image becomes eight tokens before the text. No part of it needs torchvision."""
    from transformers import Blip2Config

    sight = {
        "hidden_size": tiny_model.HEAD_DIM,
        "intermediate_size": 2 * tiny_model.HEAD_DIM,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": tiny_model.INITIALIZER_RANGE,
    }
    common = tiny_model.common(layers, hidden)
    language = {
        "model_type": "opt",
        "vocab_size": tiny_model.VOCABULARY_SIZE + 1,
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "num_hidden_layers": layers,
        "ffn_dim": common["intermediate_size"],
        "num_attention_heads": common["num_attention_heads"],
        "max_position_embeddings": 4096,  # of which each has weights
        "init_std": tiny_model.INITIALIZER_RANGE,
        **{name: common[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    return Blip2Config(
        vision_config={**sight, "image_size": IMAGE_PIXELS, "patch_size": 14},
        qformer_config={**sight, "vocab_size": 1, "encoder_hidden_size": tiny_model.HEAD_DIM},
        text_config=language,
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=tiny_model.VOCABULARY_SIZE,
        image_text_hidden_size=tiny_model.HEAD_DIM,
    )


def _hrm_text(layers: int, hidden: int) -> Any:
    """All tokens of a prompt see each other, the later ones too."""
    from transformers import HrmTextConfig

    common = tiny_model.common(layers, hidden)
    del common["num_key_value_heads"]
    return HrmTextConfig(**common | {"num_hidden_layers": 1}, H_cycles=1, L_cycles=layers)


def _save_processor(folder: Path) -> None:
    """The tokenizer, and what makes pixels of images."""
    from transformers import Blip2Processor
    from transformers.models.blip import BlipImageProcessorPil

    pixels = BlipImageProcessorPil(size={"height": IMAGE_PIXELS, "width": IMAGE_PIXELS})
    processor = Blip2Processor(pixels, tiny_model.tokenizer(IMAGE), num_query_tokens=IMAGE_TOKENS)
    processor.save_pretrained(folder)


tiny_model.FAMILIES.update(
    gemma3=Family(_gemma3, save_tokenizer),
    gpt_oss=Family(_gpt_oss, save_tokenizer),
    one_kv_head=Family(_one_kv_head, save_tokenizer),
    four_kv_heads=Family(_four_kv_heads, save_tokenizer),
    deepseek_v2=Family(_deepseek_v2, save_tokenizer),
    qwen3_next=Family(_qwen3_next, save_tokenizer),
    mellum=Family(_mellum, save_tokenizer),
    blip2=Family(_blip2, _save_processor, "AutoModelForImageTextToText"),
    hrm_text=Family(_hrm_text, save_tokenizer),
)

if __name__ == "__main__":
    tiny_model.main()
