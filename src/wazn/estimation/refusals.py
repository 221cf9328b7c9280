"""What is refused before anything is run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from wazn.cluster import Cluster, Offload, Parallel
from wazn.dtypes import FLOAT32
from wazn.errors import InputError, Unsupported
from wazn.recipe import Attention, Loss, Recipe

if TYPE_CHECKING:
    from wazn.trace.script import Script

__all__ = ["refuse_absurd", "refuse_flash_in_fp32", "refuse_meaningless", "refuse_unsupported"]

LARGEST_TENSOR_BYTES = 10**14  # no machine has it, and the sums beyond are nobody's question
_FLOAT32_BYTES = 4


def refuse_unsupported(recipe: Recipe, cluster: Cluster) -> None:
    """Say which of the choices cannot be weighed yet. Raises: Unsupported."""
    if recipe.loss is not Loss.STANDARD:
        raise Unsupported(
            f"`--loss {recipe.loss}` is not modelled",
            hint="`--loss standard` holds more: an upper bound",
        )
    layout = cluster.layout
    if layout.parallel is not Parallel.DDP:
        raise Unsupported(
            f"`--parallel {layout.parallel}`: sharding cannot be weighed yet",
            hint="`--gpus 1` without `--parallel` is weighed",
        )
    if layout.offload is not Offload.NONE:
        raise Unsupported(
            f"`--offload {layout.offload}` cannot be weighed yet",
            hint="`--optimizer paged-adamw-8bit` keeps the optimizer's states outside",
        )


def refuse_absurd(recipe: Recipe, *, num_logits: int) -> None:
    """Raises: InputError where a single tensor would have more than 100 TB. num_logits: of each token."""
    tokens = recipe.micro_batch * recipe.seq_len
    scores = 0
    if recipe.attention is Attention.EAGER:
        scores = recipe.seq_len * tokens
    fetched = 2 * recipe.grad_accum * tokens  # ids of 8 bytes
    largest = max(tokens * num_logits, scores, fetched) * _FLOAT32_BYTES
    if largest > LARGEST_TENSOR_BYTES:
        raise InputError(
            f"{recipe.micro_batch:,} x {recipe.seq_len:,} tokens, {recipe.grad_accum:,} times, make a "
            f"tensor of {largest // 10**12:,} TB",
            hint="lower `--micro-batch`, `--seq-len` or `--grad-accum`",
        )


def refuse_flash_in_fp32(recipe: Recipe) -> None:
    """Raises: InputError where the flash-attn package would.

    Source: "FlashAttention only support fp16 and bf16 data type", csrc/flash_attn/flash_api.cpp.
    """
    computed = recipe.precision.autocast_dtype or recipe.precision.weight_dtype
    if recipe.attention is Attention.FLASH and computed is FLOAT32:
        raise InputError(
            "`--attention flash`: the flash-attn package takes fp16 and bf16 only, found fp32",
            hint="`--precision bf16-mixed`, or `--attention sdpa`",
        )


def refuse_meaningless(script: Script, *, names_optimizer: bool) -> None:
    """Raises: InputError for what was said of a training script and would change nothing.

    names_optimizer: `--optimizer` was said as well.
    """
    for option, count in (
        ("--packing", script.packing),
        ("--generations", script.num_generations),
        ("--target-len", script.target_len),
        ("--prompt-len", script.prompt_len),
    ):
        if count is not None and count < 1:
            raise InputError(f"`{option}`: expected 1 or more, found `{count}`")
    if not 0.0 <= script.padding < 1.0:
        raise InputError(
            f"`--padding`: expected a number from 0 to below 1, found `{script.padding:g}`"
        )
    if script.optim is not None and names_optimizer:
        raise InputError("`--optim` takes the place of `--optimizer`", hint="say one of them")
    if script.image_size is not None and not script.num_images:
        raise InputError("`--image-size` is of images, and there are none", hint="`--images 1`")
    if script.packing is not None and script.padding:
        raise InputError("`--packing` leaves no padding", hint="leave `--padding` out")
    for option, loops in _said_of_a_loop(script):
        if script.loop.value not in loops:
            whose = " and ".join(filter(None, (", ".join(loops[:-1]), loops[-1])))
            raise InputError(
                f"`{option}` is of `--loop` {whose}, found `--loop {script.loop}`",
                hint=f"leave `{option}` out",
            )


def _said_of_a_loop(script: Script) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What was said that only some loops look at, and which these are."""
    of_trl = ("sft", "dpo", "reward", "grpo")
    preference = ("dpo", "grpo")
    for option, is_said, loops in (
        ("--optim", script.optim is not None, ("trainer", *of_trl)),
        ("--activation-offloading", script.activation_offloading, of_trl),
        ("--packing", script.packing is not None, ("trainer", "sft")),
        ("--padding", script.padding > 0, ("plain", "trainer", "sft", "dpo", "reward")),
        ("--prompt-len", script.prompt_len is not None, preference),
        ("--reference", script.reference.value != "default", preference),
        ("--generations", script.num_generations is not None, ("grpo",)),
    ):
        if is_said:
            yield option, loops
