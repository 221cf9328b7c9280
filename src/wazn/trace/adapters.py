"""What of a model is trained: a quantised base, adapters by the real `peft`, frozen parts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from textwrap import shorten
from typing import Any

import torch

from wazn.dtypes import FLOAT32
from wazn.errors import InputError
from wazn.facts.names import nearest_names
from wazn.model.fields import printable
from wazn.recipe import KbitPreparation, Quantization, QuantizationFormat, Recipe
from wazn.trace.quantized import prepare_kbit, quantise_linears, quantise_linears_8bit

__all__ = ["hint_on_targets", "lora_config", "make_base", "make_trainable"]

_LONGEST_SENTENCE = 200  # characters


def make_trainable(model: Any, recipe: Recipe) -> Any:
    """Quantise, adapt and freeze a model on `meta` as the recipe says; return it, wrapped where it has adapters."""
    model = make_base(model, recipe)
    return model if recipe.adapter is None else _with_adapters(model, recipe)


def make_base(model: Any, recipe: Recipe) -> Any:
    """Quantise or freeze a model on `meta` as the recipe says, without adapters."""
    if recipe.quantization is not None:
        _quantise(model, recipe.quantization)
    if recipe.adapter is None:
        _freeze(model, recipe.trainable, recipe.freeze)
    return model


def _quantise(model: Any, quantization: Quantization) -> None:
    if quantization.format is QuantizationFormat.INT8:
        quantise_linears_8bit(model)
    else:
        quantise_linears(
            model,
            double_quant=quantization.double_quant,
            quant_type=quantization.format.value,
        )
    if quantization.kbit_preparation is KbitPreparation.NONE:
        return
    outer = [model.get_input_embeddings(), model.get_output_embeddings()]
    kept = [(module, module.weight.dtype) for module in outer if module is not None]
    prepare_kbit(model)
    if quantization.kbit_preparation is KbitPreparation.TRL:
        # `peft_module_casting_to_bf16` in trl/trainer/utils.py: embeddings and head go back
        for module, dtype in kept:
            module.to(dtype)


def lora_config(model: Any, recipe: Recipe) -> Any:
    """Return the recipe's adapters as `peft` takes them; None where there are none.

    Raises: InputError for `attention` where no attention has linear layers, and for modules to save that are not there.
    """
    from peft import LoraConfig

    adapter = recipe.adapter
    if adapter is None:
        return None
    _refuse_missing(model, adapter.modules_to_save)
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=2 * adapter.rank,
        lora_dropout=adapter.dropout,
        target_modules=_targets(model, adapter.targets),
        modules_to_save=list(adapter.modules_to_save) or None,
        use_dora=adapter.dora,
        task_type=_task_type(model),
    )


def _refuse_missing(model: Any, modules_to_save: Iterable[str]) -> None:
    """Raises: InputError for a name with which no module's ends, as peft looks for it; it would ignore the name.

    Source: `_set_trainable` in peft/utils/other.py.
    """
    names = [name for name, _ in model.named_modules() if name]
    for wanted in modules_to_save:
        if not any(name.endswith(wanted) for name in names):
            last = dict.fromkeys(name.rpartition(".")[2] for name in names)
            near = nearest_names(wanted, last, at_most=3) or tuple(last)[-3:]
            raise InputError(
                f"`--modules-to-save {printable(wanted)}` matches no module",
                hint="for example " + ", ".join(f"`{name}`" for name in near),
            )


def _task_type(model: Any) -> str:
    """Return peft's word for the task; a classifier's new head it trains beside the adapters."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"


def _with_adapters(model: Any, recipe: Recipe) -> Any:
    from peft import get_peft_model

    lora = lora_config(model, recipe)
    try:
        with torch.device("meta"):
            wrapped = get_peft_model(model, lora)
    except ValueError as error:  # it says which names it did not find
        raise InputError(
            f"`--targets`: peft refuses: {_first_sentence(error)}",
            hint=hint_on_targets(model, error),
        ) from None
    wanted = recipe.precision.adapter_dtype
    if wanted is not FLOAT32:  # peft makes fp32 on a base in half precision
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, wanted.name))
    return wrapped


def _targets(model: Any, targets: tuple[str, ...]) -> str | list[str]:
    """Return what `LoraConfig.target_modules` takes: `all-linear`, a regular expression, or names."""
    if targets == ("attention",):
        return _attention_linears(model)
    if len(targets) == 1 and (
        targets[0] == "all-linear" or re.search(r"[*+?\[\](){}|^$\\]", targets[0])
    ):
        return targets[0]
    return list(targets)


def _attention_linears(model: Any) -> list[str]:
    """Return the last names of the matrices inside modules that are called attention."""
    found = dict.fromkeys(
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if re.search(r"attn|attention", name.rpartition(".")[0], re.IGNORECASE)
        and getattr(getattr(module, "weight", None), "ndim", 0) == 2
    )
    if not found:
        raise InputError("`--targets attention`: no linear layer of an attention was found")
    return list(found)


def _freeze(model: Any, trainable: Iterable[str], frozen: Iterable[str]) -> None:
    """Freeze what the patterns (fnmatch on parameter names) say.

    Raises: InputError where a pattern matches nothing or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for option, patterns in (("--trainable", trainable), ("--freeze", frozen)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"`{option} {pattern}` matches no parameter", hint=f"for example `{names[-1]}`"
                )
    for name, parameter in model.named_parameters():
        wanted = not trainable or any(fnmatchcase(name, pattern) for pattern in trainable)
        parameter.requires_grad_(wanted and not any(fnmatchcase(name, p) for p in frozen))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("`--trainable` and `--freeze` leave nothing to train")


def _first_sentence(error: Exception) -> str:
    return shorten(str(error).partition("\n")[0], _LONGEST_SENTENCE, placeholder=" ...")


def hint_on_targets(model: Any, error: Exception) -> str | None:
    """Return targets that `peft` takes where it refuses some of a model's, as those of Mamba that its kernels read
    past their module; None where it says something else.

    Source: `_check_lora_target_modules_mamba` in peft/tuners/tuners_utils.py.
    """
    if "incompatible with" not in str(error):
        return None
    refused = re.findall(r"'(\w+)'", str(error))
    head = model.get_output_embeddings()
    left = dict.fromkeys(
        name.removesuffix(".base_layer").rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and ".lora_" not in name
    )
    names = [name for name in left if name not in refused]
    return f"`--targets {','.join(names)}`" if names else None
