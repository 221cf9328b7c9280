"""A config.json, made a model of `transformers` on the `meta` device: sizes and types, no storage."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from wazn.errors import InputError, Unsupported
from wazn.recipe import Attention, Recipe
from wazn.trace.configs import (
    cut_layers,
    first_line,
    read_hf_config,
    text_part,
    wanted_task,
)
from wazn.trace.refusals import library_place
from wazn.trace.script import Script, Task

__all__ = ["build_model"]

# None is the choice of transformers: sdpa where the model has it, else eager
_ATTENTION = {
    Attention.SDPA: None,
    Attention.EAGER: "eager",
    Attention.FLASH: "flash_attention_2",
}
_AUTO_CLASSES = {
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.SEQ2SEQ: "AutoModelForSeq2SeqLM",
    Task.IMAGE_TEXT: "AutoModelForImageTextToText",
}


def build_model(config: Mapping[str, Any], recipe: Recipe, script: Script) -> Any:
    """Build the model that `config` (a config.json) describes, in the recipe's weight dtype, on `meta`.

    What `from_pretrained` keeps in fp32 is in fp32.

    Raises: InputError where transformers refuses the configuration; Unsupported where it has no class for it.
    """
    import transformers

    hf_config = read_hf_config(config, code_folder=script.code_folder)
    task = wanted_task(hf_config, script)
    hf_config = _config_for(hf_config, task)
    if script.num_layers is not None:
        cut_layers(hf_config, script.num_layers)
    for part in {id(part): part for part in (hf_config, text_part(hf_config))}.values():
        part.use_cache = script.use_cache
    dtype = getattr(torch, recipe.precision.weight_dtype.name)
    options = {"trust_remote_code": True} if script.code_folder is not None else {}
    auto_class = getattr(transformers, _AUTO_CLASSES[task])
    try:
        with torch.device("meta"):
            model = auto_class.from_config(
                hf_config,
                attn_implementation=_ATTENTION[recipe.attention],
                **{_dtype_option(): dtype},
                **options,
            )
    except KeyboardInterrupt:
        raise
    except (
        BaseException
    ) as error:  # a library's reading of what somebody wrote can stop anywhere, as can own code
        raise InputError(
            f"transformers {transformers.__version__} cannot build `{hf_config.model_type}` from this "
            f"configuration: {type(error).__name__}: {first_line(error)}{library_place(error)}"
        ) from error
    if config.get("tie_word_embeddings") is False:
        _untie_forced(model)
    _keep_in_fp32(model, dtype)
    return model


def _untie_forced(model: Any) -> None:
    """Give an encoder-decoder a head of its own where its configuration's class ties what config.json unties.

    T5 1.1, Flan-T5, mT5 and others of the kind say `tie_word_embeddings: false` and hold both matrices. Since 5.0
    `T5Config` and its like set it to true all the same; `from_pretrained` then finds both with different values and
    leaves them apart.

    Source: `__post_init__` in transformers/models/t5/configuration_t5.py; `tie_weights` in
    transformers/modeling_utils.py, "so we will NOT tie them".
    """
    head, config = model.get_output_embeddings(), model.config
    if head is None or not (config.is_encoder_decoder and config.tie_word_embeddings):
        return
    tied = head.weight
    head.weight = torch.nn.Parameter(torch.empty_like(tied))
    keys = getattr(model, "all_tied_weights_keys", {})
    for name in [name for name, module in model.named_modules() if module is head]:
        keys.pop(f"{name}.weight", None)


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Raise what `from_pretrained` keeps in fp32 when it loads a checkpoint in half precision: routers, biases of
    experts, some norms.

    Source: `_get_dtype_plan` in transformers/modeling_utils.py; before 5.0 the pattern `keep_in_fp32_regex` there,
    whole names between dots. `_keep_in_fp32_modules_strict` is there since 4.51.
    """
    kept: set[str] = set()
    if dtype is torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if not kept:
        return
    has_globs = hasattr(model, "_get_dtype_plan")
    patterns = [
        name.replace("*", ".*") if has_globs else rf"(^|\.){name}($|\.)" for name in sorted(kept)
    ]
    pattern = re.compile("|".join(patterns))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and pattern.search(name):
            tensor.data = tensor.data.float()


def _dtype_option() -> str:
    """Return the name under which this version of transformers takes the weights' type; `dtype` since 4.56."""
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return "dtype" if version >= (4, 56) else "torch_dtype"


# For each task but the first, where transformers has its classes by model type, in models/auto/modeling_auto.py.
_CLASSES = {
    Task.SEQUENCE_CLASSIFICATION: "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    Task.SEQ2SEQ: "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    Task.IMAGE_TEXT: "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}


def _config_for(hf_config: Any, task: Task) -> Any:
    """Return the part of the configuration that a task trains: without images the language model where it has a
    class of its own.

    Raises: Unsupported where transformers has no class of this type for the task.
    """
    from transformers.models.auto import modeling_auto as auto

    brings_code = hasattr(hf_config, "auto_map")
    if task is not Task.CAUSAL_LM:
        if brings_code or hf_config.model_type in getattr(auto, _CLASSES[task], ()):
            return hf_config
        raise Unsupported(f"transformers has no class of `{hf_config.model_type}` for `{task}`")
    text = text_part(hf_config)
    if text.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return text
    if brings_code or hf_config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return hf_config
    raise Unsupported(
        f"transformers has no causal language model for `{hf_config.model_type}` alone",
        hint="`--task image-text` without images trains it on text, with its other towers in memory",
    )
