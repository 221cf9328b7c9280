"""What the image processors of `transformers` make of images of some sizes, recorded in pictures.json.

    python -m tests.trace.pictures      needs pillow

Each processor has the settings of the published checkpoint of its model.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["RECORD", "SIZES"]

RECORD = Path(__file__).with_suffix(".json")
SIZES = ((672, 1008), (336, 336), (100, 1200), (1200, 100), (480, 640), (3000, 2000), (17, 400))

# model of the catalogue: class in transformers, its settings, whether images are nested in samples
_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
PROCESSORS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "Qwen/Qwen2-VL-2B-Instruct": ("qwen2_vl.Qwen2VL", {}, False),
    "Qwen/Qwen3-VL-2B-Instruct": (
        "qwen2_vl.Qwen2VL",
        {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
        False,
    ),
    "HuggingFaceM4/idefics2-8b": ("idefics2.Idefics2", {}, True),
    "HuggingFaceTB/SmolVLM-256M-Instruct": (
        "idefics3.Idefics3",
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        True,
    ),
    "google/gemma-4-26B-A4B": ("gemma4.Gemma4", {}, False),
    "mistralai/Ministral-3-3B-Base-2512": (
        "pixtral.Pixtral",
        {"size": {"longest_edge": 1540}, "patch_size": {"height": 28, "width": 28}},
        False,
    ),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": (
        "mllama.Mllama",
        {"size": {"height": 560, "width": 560}},
        True,
    ),
    "llava-hf/llava-v1.6-mistral-7b-hf": (
        "llava_next.LlavaNext",
        {
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            "image_grid_pinpoints": _PINPOINTS,
        },
        False,
    ),
}
_KEPT = ("image_grid_thw", "image_sizes", "aspect_ratio_ids", "aspect_ratio_mask")


def processed(model: str, height: int, width: int) -> dict[str, Any]:
    """Return the shape of an image's pixels and its small tensors, as the real processor makes them."""
    import numpy as np

    path, settings, is_nested = PROCESSORS[model]
    folder, name = path.split(".")
    module = import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    processor = getattr(module, f"{name}ImageProcessorPil")(**settings)
    image = np.zeros((height, width, 3), dtype=np.uint8)
    out = processor(images=[[image]] if is_nested else [image], return_tensors="np")
    shape = out["pixel_values"].shape
    made: dict[str, Any] = {"pixels": list(shape[1:] if is_nested else shape)}
    for name in _KEPT:
        if name in out:
            values = np.array(out[name]).tolist()
            made[name] = values[0] if is_nested else values
    if "num_soft_tokens_per_image" in out:
        made["tokens"] = int(out["num_soft_tokens_per_image"][0])
    return made


def main() -> None:
    """Write the record."""
    import transformers

    record = {
        model: {f"{height}x{width}": processed(model, height, width) for height, width in SIZES}
        for model in PROCESSORS
    }
    RECORD.write_text(json.dumps({"transformers": transformers.__version__, **record}) + "\n")


if __name__ == "__main__":
    main()
