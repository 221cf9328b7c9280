"""What is assumed of data: routers are balanced, no measured number is exactly zero."""

from __future__ import annotations

import torch

from tests.recipes import make_recipe
from wazn.trace.script import Script
from wazn.trace.step import rehearse
from wazn.trace.tracker import DEVICE
from wazn.trace.world import World


def test_every_expert_gets_as_many_tokens() -> None:
    """12 tokens that choose 2 of 8 experts are 24 choices, 3 for each, and no token chooses one twice."""
    with World():
        chosen = torch.empty((12, 8), device=DEVICE).topk(2).indices
        counts = [int((chosen == expert).sum()) for expert in range(8)]
        rows = chosen.tolist()
    assert counts == [3] * 8
    assert all(first != second for first, second in rows)


def test_the_best_expert_goes_round() -> None:
    """`argmax` and `max` over the last dimension: 6 tokens, 3 experts, 2 for each."""
    with World():
        scores = torch.empty((6, 3), device=DEVICE)
        best, again = scores.argmax(-1).tolist(), scores.max(-1).indices.tolist()
    assert best == again == [0, 1, 2, 0, 1, 2]


def test_no_pixel_is_exactly_zero() -> None:
    """What asks for zeros asks for images that only pad; there are none."""
    with World():
        pixels = torch.empty((2, 3, 8, 8), device=DEVICE)
        real = (pixels == 0.0).sum(dim=(-1, -2, -3)) != pixels[0].numel()
        assert real.tolist() == [True, True]
        assert int((pixels != 0.0).sum()) == pixels.numel()


def test_numbers_made_of_numbers_are_known() -> None:
    """Longformer counts its chunks with `torch.div(512, 256)`."""
    with World():
        assert int(torch.div(512, 256, rounding_mode="trunc")) == 2


def test_integers_are_not_assumed() -> None:
    """What is unknown and whole stays unknown."""
    with World():
        found = torch.empty((4, 8), dtype=torch.int64, device=DEVICE)
        assert bool((found == 7).any()) is False  # as a healthy run answers


def test_a_mixture_whose_experts_read_their_share_by_value() -> None:
    """JetMoE splits its tokens by the sizes that its router counted, as Python numbers: 64 tokens with 2 of 8 experts
    are 16 rows for each expert, each of hidden_size numbers.
    """
    config = {
        "model_type": "jetmoe",
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "kv_channels": 32,
        "vocab_size": 1000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    script = Script(num_steps=1)
    rehearsal = rehearse(config, make_recipe(micro_batch=1, seq_len=64), script)
    assert any(event.shape == (16, 2 * 320) for event in rehearsal.events)
