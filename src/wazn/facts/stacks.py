"""What a training stack does by habit: at a version, for a family of models.

A stack is named `hf` or `hf@4.48`: the Trainer of transformers at that minor release, with the accelerate, PEFT and
bitsandbytes of its time. `hf` alone is the newest release that was read. `docs/stacks.md` describes every field.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from wazn.errors import InputError, UnknownFact, Unsupported
from wazn.facts.store import FOLDER
from wazn.recipe import Checkpointing, Optimizer

__all__ = [
    "PREPARED",
    "RULED_FIELDS",
    "CausalBuffers",
    "Habits",
    "KvCache",
    "LossProgram",
    "Shift",
    "Upcast",
    "WindowMask",
    "resolve_stack",
    "stack_versions",
]

PREPARED = os.path.join(FOLDER, "prepared", "stacks.json")


class Upcast(StrEnum):
    """Where the logits become fp32: nowhere, in the model's forward, or in the loss function that it calls."""

    NONE = "none"
    FORWARD = "forward"
    LOSS_FUNCTION = "loss-function"


class Shift(StrEnum):
    """How token n comes to predict token n + 1: the logits are copied without the last, or the labels are padded."""

    COPY_LOGITS = "copy-logits"
    PAD_LABELS = "pad-labels"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossProgram:
    """What happens between the output matrix and the loss.

    upcast: where a name is bound again to the fp32 logits. FORWARD: the 16-bit logits die at once, the outputs are
        fp32. LOSS_FUNCTION: the model's forward and its outputs hold the 16-bit logits until the caller lets them go.
    shift: COPY_LOGITS copies nothing where the micro-batch is 1: the slice is contiguous then.
    copy_lives_in: FORWARD or LOSS_FUNCTION: the shifted copy dies when that function returns.
    recast_outputs: the fp32 logits are cast back to the type of the hidden states after the loss.
    """

    name: str
    upcast: Upcast
    shift: Shift
    copy_lives_in: Upcast
    recast_outputs: bool


class KvCache(StrEnum):
    """What the model's outputs hold of keys and values in training without checkpointing.

    TUPLE: every layer's, and accelerate copies each to fp32 under autocast. OBJECT: every layer's, as they are.
    """

    NONE = "none"
    TUPLE = "tuple"
    OBJECT = "object"


class WindowMask(StrEnum):
    """What sdpa gets where a sequence is as long as a sliding window or longer.

    ADDITIVE: one 16-bit mask [B, 1, S, S] for all layers. BOOLEAN: one boolean mask, of which sdpa makes a 16-bit one
    in each layer with a window. UNUSED: a boolean mask at every length, kept for the model's forward, used by no layer.
    """

    NONE = "none"
    ADDITIVE = "additive"
    BOOLEAN = "boolean"
    UNUSED = "unused"


class CausalBuffers(StrEnum):
    """Where boolean buffers of [max positions, max positions] are kept."""

    NONE = "none"
    ONE = "one"
    PER_LAYER = "per-layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """The habits of one stack at one version for one family; `docs/stacks.md` says what each field means."""

    stack: str
    version: str
    family: str
    # the loss
    loss: LossProgram
    logits_scaled_in_fp32: bool
    outputs_to_fp32: bool
    # the loop
    optimizer: Optimizer
    checkpointing: Checkpointing
    inputs_require_grad: bool
    fetches_step_at_once: bool
    loads_fp32: bool
    kv_cache: KvCache
    # attention
    eager_attention: bool
    sdpa_mask: bool
    window_mask: WindowMask
    repeat_kv: bool
    contiguous_qkv: bool
    # tables, norms, experts
    rotary_per_layer: bool
    rotary_stored: bool
    causal_buffers: CausalBuffers
    rotary_code: str
    norm_code: str
    fused_experts: bool
    # PEFT and bitsandbytes
    adapters_fp32: bool
    keeps_quantized_input: bool
    computes_in_input_dtype: bool
    fused_4bit_product: bool

    @property
    def minor(self) -> tuple[int, int]:
        """The version as numbers, to compare."""
        major, minor = self.version.split(".")
        return int(major), int(minor)

    @property
    def own_attention_code(self) -> bool:
        """Whether the family's class calls sdpa itself, as all did before 4.48, not through an attention function.

        It then projects queries, keys and values before it views one of them as heads.
        """
        if self.minor < (4, 48):
            return True
        return not self.contiguous_qkv if self.minor < (4, 56) else self.repeat_kv

    @property
    def caches_under_checkpointing(self) -> bool:
        """Whether checkpointing leaves the cache on: GPT-BigCode has no switch for that up to 4.52.

        Source: models/gpt_bigcode/modeling_gpt_bigcode.py:889-914@4.52; :763-767@4.53 has it.
        """
        return self.family == "gpt_bigcode" and self.minor <= (4, 52)

    @property
    def cache_copies(self) -> bool:
        """Whether the cache object makes new keys and values, which attention then uses: in 4.56 and 4.57."""
        return self.kv_cache is KvCache.OBJECT and (4, 56) <= self.minor <= (4, 57)

    @property
    def embeddings_in_32_bits(self) -> bool:
        """Whether Trainer has 8-bit optimizers keep embeddings in 32 bits: since 4.52.

        Before, `create_optimizer` asked for a class called `Adam8bit`, which Trainer never makes.
        """
        return self.minor >= (4, 52)


RULED_FIELDS = tuple(
    field for field in Habits.__dataclass_fields__ if field not in ("stack", "version", "family")
)

_MAKE: dict[str, Any] = {
    "optimizer": Optimizer,
    "checkpointing": Checkpointing,
    "kv_cache": KvCache,
    "causal_buffers": CausalBuffers,
    "window_mask": WindowMask,
}


@cache
def _prepared() -> Any:
    with open(PREPARED, "rb") as file:
        return json.loads(file.read())


def stack_versions() -> tuple[str, ...]:
    """Return the minor releases that were read, oldest first."""
    return tuple(_prepared()["minors"])


def resolve_stack(name: str, *, family: str) -> Habits:
    """Return the habits of the stack `name`, such as `hf` or `hf@4.48`, for a family (transformers' `model_type`).

    A patch release is read as its minor release: `hf@4.48.3` is `hf@4.48`.

    Raises: UnknownFact for another stack or a family that is not in the table; InputError for a version that is not
        one; Unsupported for a version that was not read, or that is older than the family.
    """
    stack, at, version = name.partition("@")
    if stack != "hf":
        minors = stack_versions()
        raise UnknownFact(
            f"unknown stack `{stack[:40]}`",
            nearest=("hf",),
            hint=f"there are `hf` and its versions, `hf@{minors[0]}` to `hf@{minors[-1]}`",
        )
    index = _version_index(version if at else stack_versions()[-1])
    prepared = _prepared()
    spans = prepared["families"].get(family)
    if spans is None:
        from difflib import get_close_matches  # only a mistake pays for it

        nearest = tuple(get_close_matches(family[:80], prepared["families"], n=3))
        raise UnknownFact(f"the habits of family `{family[:80]}` were not read", nearest=nearest)
    minors = prepared["minors"]
    if index < spans[0][0]:
        raise Unsupported(
            f"`{family}` is not in transformers {minors[index]}",
            hint=f"it came with {minors[spans[0][0]]}: `hf@{minors[spans[0][0]]}` or newer",
        )
    row = spans[bisect_right(spans, index, key=lambda span: span[0]) - 1][1]
    values = dict(zip(prepared["fields"], prepared["rows"][row], strict=True))
    for field, make in _MAKE.items():
        values[field] = make(values[field])
    values["loss"] = _loss_program(values["loss"])
    return Habits(stack=stack, version=minors[index], family=family, **values)


def _loss_program(name: str) -> LossProgram:
    program = _prepared()["loss_programs"][name]
    return LossProgram(
        name=name,
        upcast=Upcast(program["upcast"]),
        shift=Shift(program["shift"]),
        copy_lives_in=Upcast(program["copy_lives_in"]),
        recast_outputs=program["recast_outputs"],
    )


def _version_index(version: str) -> int:
    """Return the position of the minor release that `version` belongs to."""
    minors = stack_versions()
    found = re.fullmatch(r"(\d{1,3}\.\d{1,3})(\.[0-9a-z.]{1,20})?", version)
    if found is None:
        raise InputError(
            f"expected a version of transformers after `hf@`, found `{version[:40]}`",
            hint=f"`hf@{minors[0]}` to `hf@{minors[-1]}`, or `hf` for the newest",
        )
    if found[1] not in minors:
        raise Unsupported(
            f"the habits of transformers {found[1]} were not read",
            hint=f"{minors[0]} to {minors[-1]} were: `hf@{minors[0]}` to `hf@{minors[-1]}`",
        )
    return minors.index(found[1])
