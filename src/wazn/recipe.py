"""What is trained and how: a run, resolved, with no default left open.

A `Recipe` holds choices, not arithmetic. `wazn.estimate` makes one out of what a person said, what the training stack
does by habit and what wazn assumes; whoever reads a recipe reads the answer to every such question.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from wazn.dtypes import Dtype
from wazn.errors import InputError

__all__ = [
    "Adapter",
    "Attention",
    "Checkpointing",
    "KbitPreparation",
    "Loss",
    "Method",
    "Optimizer",
    "Precision",
    "Quantization",
    "QuantizationFormat",
    "Recipe",
]


class Method(StrEnum):
    """What is trained: everything, adapters, adapters on a quantised base, or a part of the weights."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"
    FREEZE = "freeze"


class QuantizationFormat(StrEnum):
    """How bitsandbytes stores a frozen matrix."""

    NF4 = "nf4"
    FP4 = "fp4"
    INT8 = "int8"


class Checkpointing(StrEnum):
    """Which activations are thrown away in forward and computed again in backward."""

    NONE = "none"
    FULL = "full"  # torch.utils.checkpoint without reentry, around each layer
    FULL_REENTRANT = "full-reentrant"
    EVERY_N = "every-n"  # full, on every n-th layer: `Recipe.checkpoint_every`
    SELECTIVE_OP = "selective-op"  # matrix products and attention kept (torchtitan)
    SELECTIVE_ATTENTION = (
        "selective-attention"  # only the attention core is computed again (Megatron)
    )


class Attention(StrEnum):
    """The attention implementation that is asked for, as transformers' `attn_implementation`."""

    SDPA = "sdpa"  # scaled_dot_product_attention, which chooses its kernel by shapes, types, mask and card
    FLASH = "flash"  # the flash-attn package: flash_attention_2
    EAGER = "eager"


class Loss(StrEnum):
    """How the loss is computed from the last hidden states."""

    STANDARD = "standard"
    CHUNKED = "chunked"
    FUSED = "fused"


class Optimizer(StrEnum):
    """The optimizer and its implementation."""

    ADAMW = "adamw"  # torch, foreach
    ADAMW_FUSED = "adamw-fused"
    ADAMW_8BIT = "adamw-8bit"
    PAGED_ADAMW_8BIT = "paged-adamw-8bit"
    PAGED_ADAMW = "paged-adamw"
    ADAFACTOR = "adafactor"
    LION = "lion"
    LION_8BIT = "lion-8bit"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    MUON = "muon"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Low-rank adapters. `targets`: `attention`, `all-linear`, or names of linears."""

    rank: int
    targets: tuple[str, ...]
    dora: bool = False
    dropout: float = 0.0
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError(f"`rank` must be a positive integer, found `{self.rank}`")
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"`lora-dropout` must be in [0, 1), found `{self.dropout}`")


class KbitPreparation(StrEnum):
    """Which helper prepares a quantised base for training, by turning what is left in 16 bits into fp32."""

    NONE = "none"
    PEFT = "peft"  # prepare_model_for_kbit_training: everything
    TRL = "trl"  # the same, then peft_module_casting_to_bf16 puts embeddings and head back


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """How the frozen base is stored, and prepared.

    block_size: elements per scale; the scales of `double_quant` are quantised again in blocks of 256.
    experts: whether the experts of a mixture are quantised: not where they are fused 3-D parameters (transformers 5).
    keeps_input: a 4-bit linear keeps its input until the loss dies, not until its backward (bitsandbytes < 0.43.2).
    computes_in_input_dtype: a 4-bit linear computes in the type of its input, not in that of autocast (< 0.47).
    fused_product: the product with a 4-bit weight is one operator (0.50 and newer), not dequantisation and linear.
    """

    format: QuantizationFormat
    double_quant: bool
    kbit_preparation: KbitPreparation
    experts: bool
    block_size: int = 64
    keeps_input: bool = False
    computes_in_input_dtype: bool = False
    fused_product: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The types of what is stored and computed.

    weight_dtype: of the (frozen or trained) base weights in memory.
    autocast_dtype: None without autocast.
    master_dtype: of a second copy that the optimizer updates; None without one.
    """

    weight_dtype: Dtype
    autocast_dtype: Dtype | None
    adapter_dtype: Dtype
    master_dtype: Dtype | None
    gradient_dtype: Dtype | None  # None: as the parameter
    state_dtype: Dtype | None  # None: as what is trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A training run on one GPU or many; sizes are per GPU.

    B = micro_batch samples of S = seq_len tokens, all of them full, `grad_accum` micro-batches per optimizer step.
    `stack` names the training stack whose habits the other fields follow, such as `hf@5.24`.
    inputs_require_grad: the embedding's output is made to require a gradient (`enable_input_require_grads`): reentrant
    checkpointing of a frozen base needs it.
    keep_outputs: the loop keeps what the model returned, logits among it, until backward is done; Trainer does not.
    zero_grad_set_to_none: gradients are let go of after the optimizer step, as PyTorch does by default, not filled with
        zeros.
    """

    method: Method
    adapter: Adapter | None
    quantization: Quantization | None
    precision: Precision
    optimizer: Optimizer
    micro_batch: int
    seq_len: int
    grad_accum: int
    checkpointing: Checkpointing
    attention: Attention
    loss: Loss
    stack: str
    checkpoint_every: int = 1
    trainable: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    max_grad_norm: float | None = 1.0
    zero_grad_set_to_none: bool = True
    keep_outputs: bool = False
    fused_experts: bool = True
    inputs_require_grad: bool = False

    def __post_init__(self) -> None:
        for name in ("micro_batch", "seq_len", "grad_accum", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"`{name.replace('_', '-')}` must be a positive integer, found `{getattr(self, name)}`"
                )
