"""What is remembered of an operation is what PyTorch answers: whole rehearsals, and the cases that could mix up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.recipes import BF16, lora_recipe, make_recipe, qlora_recipe
from tests.sampling import is_due
from wazn.dtypes import BFLOAT16
from wazn.recipe import Attention, Checkpointing, Optimizer, Recipe
from wazn.trace.recall import Recall
from wazn.trace.rehearsal import Rehearsal
from wazn.trace.script import Loop, Script
from wazn.trace.step import rehearse
from wazn.trace.tracker import DEVICE, StorageEvent
from wazn.trace.world import World

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
GEMMA = {**LLAMA, "model_type": "gemma2", "head_dim": 64, "sliding_window": 256}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
T5: dict[str, Any] = {
    "model_type": "t5",
    "d_model": 128,
    "d_ff": 256,
    "num_layers": 3,
    "num_heads": 4,
    "d_kv": 32,
    "vocab_size": 1000,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 3, "n_embd": 128, "n_head": 4}
UNDER_AUTOCAST: dict[str, Any] = {"precision": replace(BF16, autocast_dtype=BFLOAT16)}

RUNS: dict[str, tuple[dict[str, Any], Recipe, Script]] = {
    "llama, full": (LLAMA, make_recipe(), Script()),
    "llama, lora in Trainer": (
        LLAMA,
        lora_recipe(dropout=0.1, checkpointing=Checkpointing.FULL, **UNDER_AUTOCAST),
        Script(loop=Loop.TRAINER),
    ),
    "llama, qlora": (
        LLAMA,
        qlora_recipe(checkpointing=Checkpointing.FULL_REENTRANT, inputs_require_grad=True),
        Script(),
    ),
    "llama, dora by operations": (
        LLAMA,
        lora_recipe(dora=True, checkpointing=Checkpointing.SELECTIVE_OP, **UNDER_AUTOCAST),
        Script(),
    ),
    "llama, flash, 8-bit": (
        LLAMA,
        make_recipe(attention=Attention.FLASH, optimizer=Optimizer.ADAMW_8BIT, grad_accum=2),
        Script(),
    ),
    "gemma2, eager": (GEMMA, make_recipe(attention=Attention.EAGER, **UNDER_AUTOCAST), Script()),
    "gemma2, lora": (GEMMA, lora_recipe(checkpointing=Checkpointing.FULL), Script()),
    "mixtral, full": (MIXTRAL, make_recipe(optimizer=Optimizer.ADAFACTOR), Script()),
    "mixtral, lora": (MIXTRAL, lora_recipe(**UNDER_AUTOCAST), Script(capability=(7, 5))),
    "llama, lora in DPO": (LLAMA, lora_recipe(), Script(loop=Loop.DPO)),
    "t5 in Trainer": (T5, make_recipe(), Script(loop=Loop.TRAINER)),
    "gpt2, muon": (GPT2, make_recipe(optimizer=Optimizer.MUON), Script()),
}


def run(name: str) -> Rehearsal:
    config, recipe, script = RUNS[name]
    return rehearse(config, recipe, script)


def ask_each_time(_: Recall, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def in_order(events: tuple[StorageEvent, ...]) -> list[StorageEvent]:
    """Sort what is freed at one moment: autocast's cache lets go in the order of addresses."""
    runs = groupby(events, lambda event: event.num_bytes < 0)
    return [event for freed, run in runs for event in (sorted(run) if freed else run)]


@pytest.mark.parametrize("name", RUNS)
def test_every_event_is_that_of_a_run_without_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps allocate and free the same blocks in the same order, at the same places, if each operation is run."""
    if not is_due(name, turns=3):
        pytest.skip("not today's turn")
    remembered = run(name)
    monkeypatch.setattr(Recall, "__call__", ask_each_time)
    asked = run(name)
    assert in_order(remembered.events) == in_order(asked.events)
    assert remembered.names == asked.names


def test_more_equal_layers_ask_pytorch_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six equal layers ask `FakeTensorMode` no more than three: the others are made of what is remembered."""
    asked: list[Any] = []
    dispatch = FakeTensorMode.dispatch

    def counted(mode: FakeTensorMode, func: Any, *rest: Any) -> Any:
        asked.append(func)
        return dispatch(mode, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    recipe = lora_recipe(checkpointing=Checkpointing.FULL, optimizer=Optimizer.SGD)
    counts = []
    for num_layers in (3, 6):
        asked.clear()
        rehearse({**LLAMA, "num_hidden_layers": num_layers}, recipe)
        counts.append(len(asked))
    assert counts[0] == counts[1] > 0


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def test_numbers_of_other_types_are_other_questions() -> None:
    """Whole numbers plus 1 are whole numbers, plus 1.0 are not, though 1 == 1.0 == True in Python."""
    with World():
        whole = empty(4, dtype=torch.int32)
        types = [(whole + number).dtype for number in (1, 1.0, True, 1, 1.0)]
    assert types == [torch.int32, torch.float32, torch.int32, torch.int32, torch.float32]


def test_strides_and_offsets_are_part_of_the_question() -> None:
    """A view of a slice begins where the slice does; what is made like a transposed matrix is transposed."""
    with World():
        for _ in range(2):
            tensor = empty(4, 8)
            assert [part.view(2, 4).storage_offset() for part in tensor] == [0, 8, 16, 24]
            assert (tensor + 1).stride() == (8, 1)
            assert (tensor.t() + 1).stride() == (1, 8)


def test_a_remembered_view_is_of_the_argument_at_hand() -> None:
    """The same view of two tensors shares the storage of each."""
    with World() as world:
        tensors = [empty(4, 8) for _ in range(3)]
        views = [tensor.view(32) for tensor in tensors]
        blocks = [world.tracker.block_id(tensor) for tensor in tensors]
        assert [world.tracker.block_id(view) for view in views] == blocks
        assert len(set(blocks)) == 3


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda tensor: tensor.add_(1),
    "out of place": lambda tensor: tensor + 1,
    "several views": lambda tensor: tensor.chunk(2, 1),
    "several new": lambda tensor: torch.var_mean(tensor, 1),
    "in place, of many": lambda tensor: torch._foreach_add_([tensor, tensor.clone()], 1),
    "of many": lambda tensor: torch._foreach_mul([tensor, tensor.t()], 2.0),
    "many with many, and a number": lambda tensor: torch._foreach_add(
        [tensor, tensor.t(), tensor[0]], [tensor, tensor.t(), tensor[1]], alpha=2
    ),
    "many with numbers of their own": lambda tensor: torch._foreach_div(
        [tensor, tensor[0]], [1, 2]
    ),
    "one number of each of many": lambda tensor: torch._foreach_norm([tensor, tensor[0]], 2),
    "another type": lambda tensor: tensor.to(torch.bfloat16),
    "a view of another type": lambda tensor: tensor.view(torch.uint8),
    "no data": lambda tensor: torch.zeros_like(tensor, dtype=torch.int64),
    "random": lambda tensor: torch.native_dropout(tensor, 0.5, True),
    "a set of indices": lambda tensor: tensor[torch.arange(3, device=DEVICE)],
    "itself, twice": lambda tensor: tensor.mul_(tensor),
    "larger in place": lambda tensor: tensor.clone().resize_(5, 8),
    "nothing": lambda tensor: tensor[:0] @ tensor.t(),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_answer_looks_like_pytorchs_own(
    operation: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes, strides, types, keys of dispatch, and which storage it is: of the first answer and of later ones."""

    def looks(tensor: torch.Tensor) -> list[Any]:
        result = operation(tensor)
        return [
            (
                item.shape,
                item.stride(),
                item.storage_offset(),
                item.dtype,
                item.untyped_storage().nbytes(),
                item.untyped_storage()._cdata == tensor.untyped_storage()._cdata,
                item is tensor,
                item.device,
                item.fake_device,
                str(torch._C._dispatch_keys(item)),
                item._version,
            )
            for item in (
                result if isinstance(result, list | tuple) else [result] * (result is not None)
            )
        ]

    with World():
        tensors = [empty(4, 8) for _ in range(3)]
        remembered = [looks(tensor) for tensor in tensors]
        monkeypatch.setattr(Recall, "__call__", ask_each_time)
        asked = looks(empty(4, 8))
    assert remembered == [asked] * 3


def test_gradients_flow_through_what_is_remembered() -> None:
    """The third backward of the same function accumulates into a gradient of the parameter's size."""
    with World():
        weight = torch.nn.Parameter(empty(8, 8))
        for _ in range(3):
            (empty(4, 8) @ weight).relu().sum().backward()
        assert weight.grad is not None
        assert weight.grad.shape == (8, 8)
