"""One module per group of families; `MODULES` says where a `model_type` is read, so that only that module is imported."""

from __future__ import annotations

__all__ = ["MODULES"]

MODULES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "llama"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "gemma"),
    **dict.fromkeys(("phi", "phi3"), "phi"),
    **dict.fromkeys(("gpt2", "gpt_neox"), "gpt"),
}
