"""The training script around a recipe: what a `Recipe` does not say and the libraries decide. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from wazn.cluster import Gpu
from wazn.recipe import Recipe

__all__ = ["Loop", "Reference", "Script", "Task", "needs_reference"]


class Loop(StrEnum):
    """Who runs the optimizer steps."""

    PLAIN = "plain"  # a loop of our own, written like Trainer's
    TRAINER = "trainer"  # transformers.Trainer, or Seq2SeqTrainer
    SFT = "sft"  # trl.SFTTrainer, as all below
    DPO = "dpo"
    REWARD = "reward"
    GRPO = "grpo"  # what follows generation


class Task(StrEnum):
    """What the model is trained to do, thus which of transformers' auto classes makes it."""

    CAUSAL_LM = "causal-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    SEQ2SEQ = "seq2seq"
    IMAGE_TEXT = "image-text"


class Reference(StrEnum):
    """The model that the trained one is held against, in preference training."""

    DEFAULT = (
        "default"  # trl's: in DPO the base without its adapters, or a second model; in GRPO none
    )
    MODEL = "model"  # a second model; in GRPO the base without its adapters where there are any
    PRECOMPUTED = "precomputed"  # its log-probabilities, computed before training; in DPO alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What to rehearse beside the recipe.

    num_layers: the model cut to so many layers; None for all of them.
    gpu: the card, one of NVIDIA's; None for an unnamed one with room for everything.
    capability: of an unnamed card, such as (8, 0) for an A100; it decides the attention kernel.
    matmul_workspaces: whether the first matrix product of forward and of backward allocates cuBLAS's workspace.
    code_folder: a local folder whose own model code is run (`--trust-remote-code`); None runs none.
    padding: the fraction by which all samples but the first of a micro-batch are shorter than it.
    num_images: in each sample of an image-text model.
    image_size: (height, width) of each image, pixels; None where a model makes one size of all images.
    liger: the model has Liger kernels, as with `use_liger_kernel` of `TrainingArguments`.

    Of the plain loop alone:

    num_items: the loss is divided by the number of labels, as Trainer has it since 4.46.
    attention_mask: batches hold a mask of ones, as data collators add it.
    raise_outputs: accelerate's `convert_outputs_to_fp32`, under autocast.
    use_cache: of the model's configuration; Trainer switches it off since 5.0, before only under checkpointing.

    Of the Trainers alone:

    optim: the name for `TrainingArguments.optim`; None for the recipe's optimizer.
    packing: so many sequences are laid end to end in each sample, without padding; None for one sample to a row.
    target_len: tokens of the labels of an encoder-decoder; None for `seq_len`.
    activation_offloading: trl's: what forward saves for backward goes to the host.

    Of preference and of reinforcement training:

    prompt_len: tokens of the prompt, the rest of `seq_len` is the completion; None for half of them.
    num_generations: completions for each prompt, in GRPO; None for 8, as TRL.
    reference: the model to compare with.
    reserved_bytes: what an inference engine beside the training keeps for itself.
    """

    loop: Loop = Loop.PLAIN
    task: Task | None = None
    num_steps: int = 2
    num_layers: int | None = None
    gpu: Gpu | None = None
    capability: tuple[int, int] = (8, 0)
    matmul_workspaces: bool = True
    code_folder: str | None = None
    num_images: int = 0
    image_size: tuple[int, int] | None = None
    liger: bool = False
    num_items: bool = True
    attention_mask: bool = True
    raise_outputs: bool = True
    use_cache: bool = False
    optim: str | None = None
    padding: float = 0.0
    packing: int | None = None
    target_len: int | None = None
    activation_offloading: bool = False
    prompt_len: int | None = None
    num_generations: int | None = None
    reference: Reference = Reference.DEFAULT
    reserved_bytes: int = 0


def needs_reference(recipe: Recipe, script: Script) -> bool:
    """Say whether a second model stands beside the trained one. Without adapters nothing else can be the reference.

    Source: trl/trainer/dpo_trainer.py and grpo_trainer.py, "Reference model".
    """
    if script.loop is Loop.DPO:
        return script.reference is Reference.MODEL or (
            script.reference is Reference.DEFAULT and recipe.adapter is None
        )
    return (
        script.loop is Loop.GRPO and script.reference is Reference.MODEL and recipe.adapter is None
    )
