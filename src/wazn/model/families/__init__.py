"""One module per group of families; `MODULES` says where a `model_type` is read, so that only that one is imported."""

from __future__ import annotations

__all__ = ["MODULES"]

MODULES = {
    **dict.fromkeys(
        (
            *("arcee", "ernie4_5", "granite", "helium", "hunyuan_v1_dense", "internlm3", "jais2"),
            *("llama", "ministral", "mistral", "nemotron", "qwen2", "qwen3", "seed_oss"),
            *("smollm3", "stablelm", "starcoder2"),
        ),
        "llama",
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek"),
    **dict.fromkeys(
        (
            *("ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "minimax_m2", "mixtral"),
            *("olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
        ),
        "moe",
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "gemma"),
    **dict.fromkeys(
        ("cohere", "cohere2", "exaone4", "glm", "glm4", "olmo", "olmo2", "olmo3"), "olmo"
    ),
    **dict.fromkeys(("phi", "phi3"), "phi"),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj"), "gpt"),
    **dict.fromkeys(("bloom", "falcon", "mpt", "opt"), "opt"),
}
