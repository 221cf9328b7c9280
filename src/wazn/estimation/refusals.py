"""What is refused before anything is run."""

from __future__ import annotations

from wazn.cluster import Cluster, Offload, Parallel
from wazn.dtypes import FLOAT32
from wazn.errors import InputError, Unsupported
from wazn.recipe import Attention, Loss, Recipe

__all__ = ["refuse_absurd", "refuse_flash_in_fp32", "refuse_unsupported"]

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
