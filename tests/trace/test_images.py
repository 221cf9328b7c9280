"""What an image becomes: held against what the image processors of transformers made of real images."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.recipes import make_recipe
from tests.trace.pictures import RECORD
from wazn.errors import InputError, Unsupported
from wazn.facts.models import resolve_model
from wazn.timeline.events import Category
from wazn.trace.configs import read_hf_config
from wazn.trace.images import picture_of
from wazn.trace.script import Loop, Script, Task
from wazn.trace.step import rehearse

_PROCESSED = {
    (model, size): made
    for model, sizes in json.loads(RECORD.read_text()).items()
    if isinstance(sizes, dict)
    for size, made in sizes.items()
}


def _config(model: str) -> Any:
    return read_hf_config(resolve_model(model).mapping)


@pytest.mark.parametrize(("model", "size"), sorted(_PROCESSED))
def test_an_image_becomes_what_the_processor_makes_of_it(model: str, size: str) -> None:
    """Shapes of the pixels, grids, tiles and sizes are those of the real processor (tests/trace/pictures.py)."""
    height, width = (int(part) for part in size.split("x"))
    made = dict(_PROCESSED[model, size])
    config = _config(model)
    picture = picture_of(config, (height, width))
    assert list(picture.pixels) == made.pop("pixels")
    if "tokens" in made:
        assert picture.tokens.count(config.image_token_id) == made.pop("tokens")
    assert {name: picture.integers[name] for name in made} == made


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        ("llava-hf/llava-1.5-13b-hf", 576),  # (336 / 14)^2
        (
            "google/gemma-3-12b-it",
            256,
        ),  # the Gemma 3 report, arXiv:2503.19786: 256 vectors an image
        ("google/paligemma-3b-pt-224", 256),  # (224 / 14)^2
        ("google/paligemma-3b-pt-448", 1024),  # (448 / 14)^2
    ],
)
def test_models_with_one_size_take_so_many_tokens(model: str, tokens: int) -> None:
    """A token for each patch of the tower, or as many as they are pooled into."""
    config = _config(model)
    picture = picture_of(config, None)
    assert (
        picture.tokens.count(getattr(config, "image_token_index", None) or config.image_token_id)
        == tokens
    )


@pytest.mark.parametrize(
    ("size", "tiles"),
    [((336, 336), 1), ((672, 672), 5), ((300, 1000), 4), ((1344, 1344), 17)],
)
def test_llama_4_lays_images_on_tiles_and_adds_the_whole(size: tuple[int, int], tiles: int) -> None:
    """Tiles of 336 x 336, on the smallest canvas that does not shrink the image; the whole once more if several.

    Each is 24 x 24 patches, a quarter of which are tokens after the pixel shuffle.
    """
    config = _config("meta-llama/Llama-4-Maverick-17B-128E-Instruct")
    picture = picture_of(config, size)
    assert picture.pixels == (tiles, 3, 336, 336)
    assert picture.tokens.count(config.image_token_id) == tiles * 24 * 24 // 4


def test_llava_with_pixtrals_tower_ends_each_row_with_a_token() -> None:
    """Patches of 16 x 16, not merged: 640 x 320 are 40 rows of 20 image tokens, each row with one more token."""
    config = _config("mistral-community/pixtral-12b")
    picture = picture_of(config, (640, 320))
    assert picture.pixels == (1, 3, 640, 320)
    assert picture.tokens.count(config.image_token_index) == 40 * 20
    assert len(picture.tokens) == 40 * 21
    with pytest.raises(InputError, match="any size"):
        picture_of(config, None)


def test_a_size_is_asked_for_where_it_matters() -> None:
    """Qwen2-VL takes images of any size: none given is a question back, as is a size of zero."""
    config = _config("Qwen/Qwen2-VL-2B-Instruct")
    with pytest.raises(InputError, match="any size"):
        picture_of(config, None)
    with pytest.raises(InputError, match="positive"):
        picture_of(config, (0, 100))
    with pytest.raises(InputError, match="200 times"):
        picture_of(config, (10, 3000))


def test_a_model_without_a_rule_is_refused() -> None:
    """Its name and the known ones are said."""
    with pytest.raises(Unsupported, match=r"`blip-2`.*\n.*`qwen2_vl`"):
        picture_of(read_hf_config({"model_type": "blip-2"}), (224, 224))


_SMALL_QWEN = {
    "model_type": "qwen2_vl",
    "text_config": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160_000,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [8, 12, 12],
            "rope_theta": 1e6,
        },
    },
    "vision_config": {"depth": 2, "embed_dim": 128, "hidden_size": 256, "num_heads": 4},
}


def test_images_are_inputs_and_reach_the_vision_tower() -> None:
    """224 x 224 are 16 x 16 patches of 3 x 2 x 14 x 14 fp32 numbers: the inputs of two samples with two images each.

    Beside them: ids, mask, labels and two kinds of marks at most, [2, 512] int64 each, and four grids.
    """
    script = Script(task=Task.IMAGE_TEXT, num_images=2, image_size=(224, 224), num_steps=1)
    rehearsal = rehearse(_SMALL_QWEN, make_recipe(micro_batch=2, seq_len=512), script)
    sizes = [
        event.num_bytes
        for event in rehearsal.events
        if event.num_bytes > 0 and rehearsal.names.get(event.block_id, [None])[0] is Category.INPUTS
    ]
    pixels = 2 * 2 * 16 * 16 * (3 * 2 * 14 * 14) * 4
    assert sizes.count(pixels) == 1
    assert set(sizes) == {pixels, 2 * 512 * 8, 4 * 3 * 8}
    patches = [event for event in rehearsal.events if event.shape == (4 * 16 * 16, 128)]
    assert patches


def test_images_that_leave_no_room_for_text_are_refused() -> None:
    """224 x 224 are 64 tokens between two marks."""
    script = Script(task=Task.IMAGE_TEXT, num_images=1, image_size=(224, 224))
    with pytest.raises(InputError, match="66 tokens"):
        rehearse(_SMALL_QWEN, make_recipe(seq_len=66), script)


def test_text_alone_is_rehearsed_without_images() -> None:
    """An image-text model with no images runs its language model."""
    script = Script(task=Task.IMAGE_TEXT, num_steps=1)
    rehearsal = rehearse(_SMALL_QWEN, make_recipe(micro_batch=1, seq_len=64), script)
    assert not any(
        event.dtype == "float32" and event.shape[-1:] == (1176,) for event in rehearsal.events
    )


def test_trainer_feeds_images_too() -> None:
    """The real Trainer's batches hold the same pixels, moved to the card: in fp32."""
    sizes = make_recipe(micro_batch=2, seq_len=512)
    shown = {"task": Task.IMAGE_TEXT, "num_images": 2, "image_size": (224, 224), "num_steps": 1}
    rehearsal = rehearse(_SMALL_QWEN, sizes, Script(loop=Loop.TRAINER, **shown))
    pixels = 2 * 2 * 16 * 16 * (3 * 2 * 14 * 14) * 4
    assert any(event.num_bytes == pixels and event.dtype == "float32" for event in rehearsal.events)
