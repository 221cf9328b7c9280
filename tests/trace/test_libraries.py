"""What libraries believe inside a world, and that they are told the truth again outside."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers.utils.import_utils as import_utils

from wazn.errors import Unsupported
from wazn.trace.tracker import DEVICE
from wazn.trace.world import World


def test_transformers_does_not_think_that_it_is_traced() -> None:
    """It would build masks that a real run skips."""
    with World():
        assert not import_utils.is_tracing(torch.empty(1, device=DEVICE))
    assert import_utils.is_fake_tensor.__module__.startswith("transformers")


def test_modules_can_be_cast_and_keep_what_was_noted_on_their_parameters() -> None:
    """`Module.to` makes new parameters, ties included, and the old blocks go: 64 x 32 from 4 to 2 bytes."""
    model = torch.nn.ModuleList(
        torch.nn.Linear(64, 32, bias=False, device="meta") for _ in range(2)
    )
    model[1].weight = model[0].weight
    with World() as world:
        world.materialise(model)
        model[0].weight.note = "kept"
        model.to(torch.bfloat16)
        assert model[0].weight is model[1].weight
        assert (model[0].weight.dtype, model[0].weight.note) == (torch.bfloat16, "kept")
        assert world.tracker.current_bytes == 64 * 32 * 2


def test_optimizers_and_clipping_choose_foreach() -> None:
    """On CUDA both take foreach when nobody chooses; the CPU would go tensor by tensor."""
    with World() as world:
        weights = [torch.empty(8, device=DEVICE, requires_grad=True) for _ in range(3)]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        optimizer = torch.optim.AdamW(weights)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        operations = {event.op for event in world.tracker.events}
    assert "aten._foreach_norm.Scalar" in operations
    assert "aten._foreach_sqrt.default" in operations


def test_flex_attention_is_refused() -> None:
    """Run eagerly it would write out the scores that its compiled kernel avoids."""
    import transformers.integrations.flex_attention  # which imports the function by name
    from torch.nn.attention import flex_attention

    with World(), pytest.raises(Unsupported, match="FlexAttention"):
        transformers.integrations.flex_attention.flex_attention(None, None, None)
    with World(), pytest.raises(Unsupported, match="FlexAttention"):
        flex_attention.create_block_mask(None, None, None, 8, 8)
    assert flex_attention.flex_attention.__module__ == "torch.nn.attention.flex_attention"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler imports
def test_what_is_compiled_runs_eagerly() -> None:
    """A compiler would look at data; the function itself is run: 8 bytes for its result."""
    double = torch.compile(lambda x: x * 2)
    with World() as world:
        made = double(torch.empty(2, device="cuda"))
        assert world.tracker.maker(made) == "aten.mul.Tensor"


def test_without_torch_the_extra_is_named() -> None:
    """`import wazn.trace` is free; what needs torch says which extra brings it."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import wazn.trace\n"
        "from wazn.errors import MissingExtra\n"
        "try:\n    wazn.trace.World\n"
        "except MissingExtra as error:\n    print(error.extra, error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "trace pip install 'wazn[trace]'"
