"""What an image becomes before a model sees it: tokens in the text, and tensors beside it.

A processor does that, whose settings lie beside the checkpoint (`preprocessor_config.json`). None is loaded here: each
rule below computes the same from config.json and the image's size, with the default settings of its class in
`transformers.models` (or of the published checkpoint, where it says so). All images of a run have one size.

Shape legend: B samples in a micro-batch, n images in each, S tokens in a sample, C channels, P patches, T tiles.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from wazn.errors import InputError, Unsupported

__all__ = ["Picture", "image_batch", "picture_of", "sees_images"]

_TEXT = 4  # any token that means nothing to the model
_IGNORED = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One image as the model gets it.

    tokens: what stands for it in the text.
    pixels: the shape of its `pixel_values`, fp32.
    integers: other tensors, int64: nested lists, or (shape, value) for one value everywhere.
    nested: its tensors are [B, n * first, ...]; otherwise those of all images are joined along the first dimension.
    """

    tokens: tuple[int, ...]
    pixels: tuple[int, ...]
    integers: dict[str, Any]
    nested: bool = False


def picture_of(config: Any, size: tuple[int, int] | None) -> Picture:
    """Return what an image of `size` (height, width) becomes for a model with this configuration.

    None is the size of the vision tower, for models with one size for all images.

    Raises: Unsupported for a model without a rule; InputError for a size that is missing or not positive.
    """
    rule = _RULES.get(config.model_type)
    if rule is None:
        raise Unsupported(
            f"images for `{config.model_type}` cannot be rehearsed: its processor is not known here",
            hint="known are " + ", ".join(f"`{name}`" for name in _RULES),
        )
    if size is None:
        if not _has_one_size(config):
            raise InputError(
                f"`{config.model_type}` takes images of any size",
                hint="say which: `--image-size 1024x768`",
            )
        size = (1, 1)
    if min(size) < 1:
        raise InputError(f"an image has a positive height and width, found {size[0]}x{size[1]}")
    return rule(config, *size)


def _has_one_size(config: Any) -> bool:
    is_square = config.model_type in ("llava", "gemma3", "paligemma")
    return is_square and config.vision_config.model_type != "pixtral"


def image_batch(
    model: Any,
    *,
    micro_batch: int,
    seq_len: int,
    num_images: int,
    image_size: tuple[int, int] | None,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """Return a micro-batch for an image-text model: text of S tokens that begins with n images, labels on the rest.

    device: where its tensors are made; None leaves them on the host.

    Raises: InputError if the images need more tokens than there are; as `picture_of`.
    """
    config = model.config
    picture = picture_of(config, image_size) if num_images else None
    row = list(picture.tokens if picture is not None else ()) * num_images
    if len(row) >= seq_len:
        raise InputError(
            f"{num_images} image(s) take {len(row):,} tokens; `--seq-len` {seq_len:,} leaves none for text",
            hint=f"`--seq-len {len(row) + 256}`, fewer or smaller images",
        )
    is_image = [int(token == image_token(config)) for token in row]
    row += [_TEXT] * (seq_len - len(row))
    is_image += [0] * (seq_len - len(is_image))
    labels = [_IGNORED if mark else token for token, mark in zip(row, is_image, strict=True)]
    batch = {
        "input_ids": _rows(row, micro_batch, device),
        "attention_mask": _rows([1] * seq_len, micro_batch, device),
        "labels": _rows(labels, micro_batch, device),
    }
    taken = inspect.signature(model.forward).parameters
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in taken:  # 1 where an image is; PaliGemma means the answer by it
            marks = is_image
            if config.model_type == "paligemma":
                marks = [int(label != _IGNORED) for label in labels]
            batch[name] = _rows(marks, micro_batch, device)
    if picture is None:
        return batch
    copies = micro_batch * num_images
    outer = (micro_batch, -1) if picture.nested else (-1,)
    pixels = torch.empty(
        (copies * picture.pixels[0], *picture.pixels[1:]), dtype=torch.float32, device=device
    )
    batch["pixel_values"] = pixels.view(*outer, *picture.pixels[1:])
    for name, values in picture.integers.items():
        batch[name] = _joined(values, copies, outer, device)
    if config.model_type == "mllama":
        batch["cross_attention_mask"] = _cross_attention_mask(
            picture, micro_batch, seq_len, num_images, device
        )
    return batch


def sees_images(model: Any) -> bool:
    """Say whether a model has a tower for images."""
    return getattr(model.config, "vision_config", None) is not None


def _rows(row: list[int], count: int, device: torch.device | None) -> torch.Tensor:
    return torch.tensor([row] * count, dtype=torch.int64, device=device)


def _joined(
    values: Any, copies: int, outer: tuple[int, ...], device: torch.device | None
) -> torch.Tensor:
    if isinstance(values, tuple):
        shape, value = values
        one = torch.full((copies * shape[0], *shape[1:]), value, dtype=torch.int64, device=device)
    else:
        one = torch.tensor(values * copies, dtype=torch.int64, device=device)
    return one.view(*outer, *one.shape[1:])


def _cross_attention_mask(
    picture: Picture, micro_batch: int, seq_len: int, num_images: int, device: torch.device | None
) -> torch.Tensor:
    """[B, S, n, T]: every token may look at every tile that is not padding.

    Source: `convert_sparse_cross_attention_mask_to_dense` in models/mllama/processing_mllama.py, for images ahead of
    the text.
    """
    tiles = picture.integers["aspect_ratio_mask"][0]
    return torch.tensor(
        [[[tiles] * num_images] * seq_len] * micro_batch, dtype=torch.int64, device=device
    )


def image_token(config: Any) -> int:
    """Return the token that a model replaces by what it saw."""
    for name in ("image_token_id", "image_token_index"):
        token = getattr(config, name, None)
        if token is not None:
            return int(token)
    raise Unsupported(f"`{config.model_type}`: the configuration names no image token")


def _patches_per_side(vision: Any) -> int:
    return int(vision.image_size) // int(vision.patch_size)


# --- one size for all -----------------------------------------------------------------------------


def _llava(config: Any, height: int, width: int) -> Picture:
    """CLIP's square crop. Source: `LlavaProcessor.replace_image_token`; CLIP's class token is dropped by the default
    `vision_feature_select_strategy`. With Pixtral's tower it takes images of any size.
    """
    vision = config.vision_config
    if vision.model_type == "pixtral":
        return _mistral3(config, height, width)
    count = _patches_per_side(vision) ** 2 + _class_token(config)
    pixels = (1, vision.num_channels, vision.image_size, vision.image_size)
    return Picture(tokens=(image_token(config),) * count, pixels=pixels, integers={})


def _class_token(config: Any) -> int:
    """CLIP has one, which the strategy `full` keeps."""
    return int(
        config.vision_config.model_type == "clip_vision_model"
        and config.vision_feature_select_strategy == "full"
    )


def _gemma3(config: Any, height: int, width: int) -> Picture:
    """Source: `Gemma3Processor`, without pan and scan: line breaks and marks around `mm_tokens_per_image` tokens."""
    vision = config.vision_config
    tokens = (_TEXT,) * 2 + (image_token(config),) * config.mm_tokens_per_image + (_TEXT,) * 2
    pixels = (1, vision.num_channels, vision.image_size, vision.image_size)
    return Picture(tokens=tokens, pixels=pixels, integers={})


def _paligemma(config: Any, height: int, width: int) -> Picture:
    """Source: `PaliGemmaProcessor.replace_image_token`: a token for each patch of SigLIP."""
    vision = config.vision_config
    count = _patches_per_side(vision) ** 2
    pixels = (1, vision.num_channels, vision.image_size, vision.image_size)
    return Picture(tokens=(image_token(config),) * count, pixels=pixels, integers={})


# --- tiles of one size ----------------------------------------------------------------------------


def _llava_next(config: Any, height: int, width: int) -> Picture:
    """The whole image and tiles of the best of `image_grid_pinpoints`, without the padding, a token more for each row.

    Source: `LlavaNextProcessor._get_number_of_features`, `select_best_resolution` in image_processing_utils.py.
    """
    vision = config.vision_config
    side = _patches_per_side(vision)
    best = max(
        config.image_grid_pinpoints, key=lambda canvas: _fit(canvas, height=height, width=width)
    )
    rows, columns = (best[0] // vision.image_size, best[1] // vision.image_size)
    tall, wide = rows * side, columns * side
    if width / height > wide / tall:
        tall -= (tall - int(round(height * (wide / width), 7))) // 2 * 2
    else:
        wide -= (wide - int(round(width * (tall / height), 7))) // 2 * 2
    count = side**2 + tall * wide + tall + _class_token(config)
    tiles = 1 + rows * columns
    pixels = (1, tiles, vision.num_channels, vision.image_size, vision.image_size)
    return Picture(
        tokens=(image_token(config),) * count,
        pixels=pixels,
        integers={"image_sizes": [[height, width]]},
    )


def _fit(canvas: list[int], *, height: int, width: int) -> tuple[int, int]:
    """Return the pixels that an image keeps on a canvas, then how few of the canvas are wasted."""
    scale = min(canvas[1] / width, canvas[0] / height)
    kept = min(int(width * scale) * int(height * scale), width * height)
    return kept, kept - canvas[0] * canvas[1]


def _tiling(height: int, width: int, *, tile: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of tiles that an image is laid on: the smallest enlargement, else the least
    reduction, on the smallest such canvas.

    Source: `get_optimal_tiled_canvas` in models/mllama, `get_best_fit` in models/llama4.
    """
    scales = {
        (rows, columns): min(columns * tile / width, rows * tile / height)
        for rows, columns in product(range(1, most + 1), repeat=2)
        if rows * columns <= most
    }
    larger = [scale for scale in scales.values() if scale >= 1]
    chosen = min(larger) if larger else max(scales.values())
    return min(
        (tiles for tiles, scale in scales.items() if scale == chosen),
        key=lambda tiles: tiles[0] * tiles[1],
    )


_LLAMA4_TILES = 16  # `max_patches` of Llama4ImageProcessor


def _llama4(config: Any, height: int, width: int) -> Picture:
    """Tiles with separators, then the whole image if there are several.

    Source: `Llama4Processor._prompt_split_image`, `Llama4ImageProcessor._preprocess`.
    """
    vision = config.vision_config
    rows, columns = _tiling(height, width, tile=vision.image_size, most=_LLAMA4_TILES)
    each = int(_patches_per_side(vision) ** 2 * vision.pixel_shuffle_ratio**2)
    patch = (image_token(config),) * each
    tokens: tuple[int, ...] = (_TEXT,)
    if rows * columns > 1:
        row = (patch + (_TEXT,)) * columns
        tokens += row * rows
    tokens += (_TEXT, *patch, _TEXT)
    tiles = rows * columns + (rows * columns > 1)
    pixels = (tiles, vision.num_channels, vision.image_size, vision.image_size)
    return Picture(tokens=tokens, pixels=pixels, integers={})


def _mllama(config: Any, height: int, width: int) -> Picture:
    """Up to `max_num_tiles` tiles, padded to as many; one token in the text. Source: models/mllama."""
    vision = config.vision_config
    most = vision.max_num_tiles
    rows, columns = _tiling(height, width, tile=vision.image_size, most=most)
    arrangements = [
        pair for pair in product(range(1, most + 1), repeat=2) if math.prod(pair) <= most
    ]
    tiles = rows * columns
    return Picture(
        tokens=(image_token(config),),
        pixels=(1, most, vision.num_channels, vision.image_size, vision.image_size),
        integers={
            "aspect_ratio_ids": [arrangements.index((rows, columns)) + 1],
            "aspect_ratio_mask": [[1] * tiles + [0] * (most - tiles)],
        },
        nested=True,
    )


def _idefics3(config: Any, height: int, width: int) -> Picture:
    """Scaled to four tiles along the longer side, cut into tiles, and the whole image.

    Source: `Idefics3ImageProcessor` and `Idefics3Processor.replace_image_token`; the longest edge is four tiles in the
    class (4 * 364) and in the published SmolVLM (2048 = 4 * 512).
    """
    vision = config.vision_config
    tile, longest = vision.image_size, 4 * vision.image_size
    if width >= height:
        wide, tall = longest, int(longest / (width / height))
        tall += tall % 2
    else:
        tall, wide = longest, int(longest * (width / height))
        wide += wide % 2
    rows, columns = math.ceil(max(tall, 1) / tile), math.ceil(max(wide, 1) / tile)
    seen = (image_token(config),) * (_patches_per_side(vision) ** 2 // config.scale_factor**2)
    cut = (((_TEXT,) * 2 + seen) * columns + (_TEXT,)) * rows
    tiles = rows * columns + 1
    return Picture(
        tokens=(*cut, *(_TEXT,) * 3, *seen, _TEXT),
        pixels=(tiles, vision.num_channels, tile, tile),
        integers={"pixel_attention_mask": ((tiles, tile, tile), 1)},
        nested=True,
    )


# --- any size -------------------------------------------------------------------------------------

_IDEFICS2_EDGES = (378, 980)  # `size` of Idefics2ImageProcessor


def _idefics2(config: Any, height: int, width: int) -> Picture:
    """One image within 980 pixels, not split; the perceiver's latents stand for it.

    Source: `get_resize_output_image_size` in models/idefics2, `Idefics2Processor`.
    """
    shortest, longest = _IDEFICS2_EDGES
    ratio = width / height
    if width >= height and width > longest:
        width, height = longest, int(longest / ratio)
    elif height > width and height > longest:
        width, height = int(longest * ratio), longest
    height, width = max(height, shortest), max(width, shortest)
    seen = (image_token(config),) * config.perceiver_config.resampler_n_latents
    return Picture(
        tokens=(_TEXT, *seen, _TEXT),
        pixels=(1, config.vision_config.num_channels, height, width),
        integers={"pixel_attention_mask": ((1, height, width), 1)},
        nested=True,
    )


def _mistral3(config: Any, height: int, width: int) -> Picture:
    """Within the tower's longest edge, in whole merged patches; a token more at each row's end.

    Source: `PixtralProcessor.replace_image_token`, `get_resize_output_image_size` in models/pixtral.
    """
    vision = config.vision_config
    step = vision.patch_size * getattr(config, "spatial_merge_size", 1)
    ratio = max(height, width) / vision.image_size
    if ratio > 1:
        height, width = int(height / ratio), int(width / ratio)
    rows, columns = math.ceil(max(height, 1) / step), math.ceil(max(width, 1) / step)
    return Picture(
        tokens=((image_token(config),) * columns + (_TEXT,)) * rows,
        pixels=(1, vision.num_channels, rows * step, columns * step),
        integers={"image_sizes": [[rows * step, columns * step]]},
    )


# (fewest, most) pixels: of Qwen2VLImageProcessor; of the published Qwen3-VL
_QWEN2_PIXELS = (56 * 56, 28 * 28 * 1280)
_QWEN3_PIXELS = (65_536, 16_777_216)


def _qwen(config: Any, height: int, width: int) -> Picture:
    """Patches of two frames, 2 x 2 of them a token. Source: `smart_resize` in models/qwen2_vl, `Qwen2VLProcessor`."""
    vision = config.vision_config
    patch, merge = vision.patch_size, vision.spatial_merge_size
    is_first = config.model_type in ("qwen2_vl", "qwen2_5_vl")
    bounds = _QWEN2_PIXELS if is_first else _QWEN3_PIXELS
    height, width = _within(height, width, factor=patch * merge, bounds=bounds)
    rows, columns = height // patch, width // patch
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    tokens = rows * columns // merge**2
    return Picture(
        tokens=(
            config.vision_start_token_id,
            *(image_token(config),) * tokens,
            config.vision_end_token_id,
        ),
        pixels=(rows * columns, channels * vision.temporal_patch_size * patch**2),
        integers={"image_grid_thw": [[1, rows, columns]]},
    )


def _within(height: int, width: int, *, factor: int, bounds: tuple[int, int]) -> tuple[int, int]:
    fewest, most = bounds
    if max(height, width) > 200 * min(height, width):
        raise InputError(f"an image's sides differ by at most 200 times, found {height}x{width}")
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > most:
        beta = math.sqrt(height * width / most)
        tall = max(factor, math.floor(height / beta / factor) * factor)
        wide = max(factor, math.floor(width / beta / factor) * factor)
    elif tall * wide < fewest:
        beta = math.sqrt(fewest / (height * width))
        tall = math.ceil(height * beta / factor) * factor
        wide = math.ceil(width * beta / factor) * factor
    return tall, wide


def _gemma4(config: Any, height: int, width: int) -> Picture:
    """As many patches as fit the budget of soft tokens, padded to it.

    Source: `get_aspect_ratio_preserving_size` and `Gemma4ImageProcessor._preprocess` in models/gemma4.
    """
    vision = config.vision_config
    patch, pool = vision.patch_size, vision.pooling_kernel_size
    budget = config.vision_soft_tokens_per_image * pool**2
    step = patch * pool
    factor = math.sqrt(budget * patch**2 / (height * width))
    tall, wide = int(factor * height / step) * step, int(factor * width / step) * step
    longest = budget // pool**2 * step
    if tall == 0:
        tall, wide = step, min(width // height * step, longest)
    elif wide == 0:
        tall, wide = min(height // width * step, longest), step
    rows, columns = tall // patch, wide // patch
    places = [[x, y] for y in range(rows) for x in range(columns)]
    places += [[-1, -1]] * (budget - rows * columns)
    return Picture(
        tokens=(_TEXT, *(image_token(config),) * (rows * columns // pool**2), _TEXT),
        pixels=(1, budget, 3 * patch**2),
        integers={"image_position_ids": [places]},
    )


_RULES: dict[str, Callable[[Any, int, int], Picture]] = {
    "llava": _llava,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "llava_next": _llava_next,
    "llama4": _llama4,
    "mllama": _mllama,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "idefics2": _idefics2,
    "mistral3": _mistral3,
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "gemma4": _gemma4,
}
