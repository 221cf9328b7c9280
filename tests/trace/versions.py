"""What whole steps hold with other versions of `transformers`, recorded once, in an environment of each
version.

    python -m tests.trace.versions

rehearses every case with the installed version and writes it into versions.json. The record has, by
version and case, the peak of every phase of two steps, in bytes: `{"4.48.3": {"mistral: full": {"1 loss":
...}}}`. A case that a version cannot run (a newer model class, fp32 experts without a kernel) is left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transformers

from tests.recipes import AUTOCAST, lora_recipe, make_recipe
from wazn.recipe import Checkpointing, Recipe
from wazn.trace.script import Script
from wazn.trace.step import rehearse

__all__ = ["CASES", "RECORD", "measure"]

RECORD = Path(__file__).with_suffix(".json")

_LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LLAMA},
    "mistral": {"model_type": "mistral", "sliding_window": None, **_LLAMA},
    "qwen2": {"model_type": "qwen2", **_LLAMA},
    "gemma": {"model_type": "gemma", "head_dim": 128, **_LLAMA},
    "gemma2": {"model_type": "gemma2", "head_dim": 128, "sliding_window": 4096, **_LLAMA},
    "phi": {"model_type": "phi", **_LLAMA, "num_key_value_heads": 16},
    "phi3": {"model_type": "phi3", "pad_token_id": 0, **_LLAMA},
    "gpt_neox": {"model_type": "gpt_neox", **_LLAMA},
    "gpt2": {"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 2, "n_positions": 2048},
    "opt": {
        "model_type": "opt",
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
        "vocab_size": 32000,
        "word_embed_proj_dim": 1024,
    },
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 1024,
        "n_head": 16,
        "n_layer": 2,
        "vocab_size": 32000,
    },
    "falcon": {
        "model_type": "falcon",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
        "vocab_size": 32000,
    },
    "starcoder2": {"model_type": "starcoder2", **_LLAMA},
    "stablelm": {"model_type": "stablelm", **_LLAMA},
    "cohere": {"model_type": "cohere", **_LLAMA},
    "olmo": {"model_type": "olmo", **_LLAMA},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, **_LLAMA},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        **_LLAMA,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 128, **_LLAMA},
    "granite": {"model_type": "granite", **_LLAMA},
    "olmo2": {"model_type": "olmo2", **_LLAMA},
}
RECIPES: dict[str, Recipe] = {
    "full": make_recipe(),
    "full, checkpointing": make_recipe(checkpointing=Checkpointing.FULL),
    "full, autocast": make_recipe(precision=AUTOCAST),
    "lora": lora_recipe(dropout=0.1),
}
CASES = {
    f"{model}: {recipe}": (model, recipe)
    for model in MODELS
    for recipe in RECIPES
    if recipe != "lora" or model in ("llama", "mistral", "qwen2", "gemma", "gemma2", "phi3")
}


def measure(case: str) -> dict[str, int]:
    """Rehearse one case with the installed version; returns the peaks by `step phase`."""
    model, recipe = CASES[case]
    peaks = rehearse(MODELS[model], RECIPES[recipe], Script(matmul_workspaces=False)).peaks()
    return {f"{step} {phase}": peak_bytes for (step, phase), peak_bytes in peaks.items()}


def main() -> None:
    """Rehearse every case and write the record."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    measured: dict[str, dict[str, int]] = {}
    for case in CASES:
        try:
            measured[case] = measure(case)
        except Exception as error:
            sys.stderr.write(f"{case}: {type(error).__name__}: {str(error)[:200]}\n")
    record[transformers.__version__] = measured
    ordered = sorted(record.items(), key=lambda item: [int(part) for part in item[0].split(".")])
    RECORD.write_text(json.dumps(dict(ordered), indent=1) + "\n")


if __name__ == "__main__":
    main()
