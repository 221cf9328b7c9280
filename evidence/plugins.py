"""The plugins of fms-acceleration, applied by their own code to a model on `meta`.

    accelerated-peft     GPTQ bases: its own linear layers and its own way to put adapters on them
    fused-ops-and-kernels  ("foak") fused norms, rotary embeddings, loss and adapters, put into the model as patches

Runs inside an environment that has the packages; its kernels are Triton's and do nothing here. The configurations are
those of `sample-configurations/` in the repository. Its `*-foak-liger` files for quantised bases misspell
`fast_rms_layernorm` since they were merged (commit 733992a), which leaves the norm as it is; the measured runs are of
a commit before that, and had it fused: so rehearsed they agree to 512 bytes, and otherwise are 3 % higher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from wazn.recipe import Recipe
from wazn.trace.adapters import make_trainable
from wazn.trace.bnb_library import without_library
from wazn.trace.imports import patched, when_imported
from wazn.trace.liger import sees_triton

__all__ = ["PLUGINS", "adapt_with"]

_FUSED = {"fast_loss": True, "fast_rms_layernorm": True, "fast_rope_embeddings": True}
_LIGER = {**_FUSED, "fast_loss": "fused_ce_liger"}
_OVER_BNB = {"base_layer": "bitsandbytes", "fused_lora": True}
_OVER_GPTQ = {"base_layer": "auto_gptq", "fused_lora": True}
_PACKAGES = ("fms_acceleration_foak", "fms_acceleration_peft")
_TRAINING = "training.fused_ops_and_kernels"
_QUANTISED = "peft.quantization.fused_ops_and_kernels"

# by name: the base that a plugin quantises, and the section and settings of fused-ops-and-kernels
PLUGINS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "": ("", "", {}),
    "foak-fast-kernels": ("", _TRAINING, _FUSED),
    "foak-fast-kernels-liger": ("", _TRAINING, _LIGER),
    "accelerated-peft-bnb-foak": ("", _QUANTISED, {**_OVER_BNB, **_FUSED}),
    "accelerated-peft-bnb-foak-liger": ("", _QUANTISED, {**_OVER_BNB, **_LIGER}),
    "accelerated-peft-autogptq": ("gptq", "", {}),
    "accelerated-peft-autogptq-foak": ("gptq", _QUANTISED, {**_OVER_GPTQ, **_FUSED}),
    "accelerated-peft-autogptq-foak-liger": ("gptq", _QUANTISED, {**_OVER_GPTQ, **_LIGER}),
}


def adapt_with(name: str, *, group_size: int = 128) -> Callable[[Any, Recipe], Any]:
    """Return what makes a model trainable under these plugins, for `wazn.trace.step.rehearse(adapt=...)`.

    group_size: weights that share a scale in a GPTQ checkpoint; -1 where all of a row do.
    """
    base, section, settings = PLUGINS[name]

    def adapt(model: Any, recipe: Recipe) -> Any:
        if base != "gptq":
            model = make_trainable(model, recipe)
        if recipe.quantization is not None:
            _base_of(model).quantization_method = "bitsandbytes"
        if not (base or section):
            return model
        import bitsandbytes.functional

        # an A100 to code that asks while it is imported
        card = {"device_count": lambda: 1, "get_device_capability": lambda *_: (8, 0)}
        with (
            when_imported({}, executed_in=dict.fromkeys(_PACKAGES, sees_triton)),
            without_library(bitsandbytes.functional),
            patched(torch.cuda, card),
        ):
            if base == "gptq":
                model = _with_gptq(model, recipe, group_size)
            if section:
                _fuse(model, section, settings)
        return model

    return adapt


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _fuse(model: Any, section: str, settings: Mapping[str, Any]) -> None:
    """Do what the framework does: the plugin registers its patches, and the patcher applies them to the model."""
    from fms_acceleration.model_patcher import ModelPatcher
    from fms_acceleration_foak.framework_plugin_fast_kernels import FastKernelsAccelerationPlugin

    configuration: Any = settings
    for key in reversed(section.split(".")):
        configuration = {key: configuration}
    plugin = FastKernelsAccelerationPlugin(configuration)
    mixed = SimpleNamespace(bf16=True, fp16=False)  # it asks whether there is mixed precision
    plugin.augmentation(_base_of(model), mixed, (None,))
    ModelPatcher.patch(model)


def _with_gptq(model: Any, recipe: Recipe, group_size: int) -> Any:
    """Put the plugin's 4-bit layers in place of the linears of a checkpoint, and adapters on them as it does."""
    from fms_acceleration_peft.gptqmodel.nn_modules.qlinear.qlinear_tritonv2 import QuantLinear
    from fms_acceleration_peft.gptqmodel.utils.peft import get_gptq_peft_model
    from peft import LoraConfig

    assert recipe.adapter is not None
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and module is not head and not _is_router(name):
            with torch.device("meta"):
                layer = QuantLinear(
                    4, group_size, module.in_features, module.out_features, module.bias is not None
                )
            model.set_submodule(name, layer)
    for (
        parameter
    ) in model.parameters():  # `prepare_model_for_kbit_training` leaves GPTQ bases in 16 bits
        parameter.requires_grad_(False)
    model.quantization_method = "gptq"
    wanted = LoraConfig(
        r=recipe.adapter.rank,
        lora_alpha=16,
        lora_dropout=recipe.adapter.dropout,
        target_modules=list(recipe.adapter.targets),
        task_type="CAUSAL_LM",
    )
    whole = SimpleNamespace(model=model)
    adapted = get_gptq_peft_model(
        whole, peft_config=wanted, auto_find_all_linears=False, train_mode=True
    )
    _base_of(adapted).quantization_method = "gptq"
    return adapted


def _is_router(name: str) -> bool:
    """GPTQ checkpoints of Mixtral leave the routers in 16 bits (`gptqmodel/models/mixtral.py`: `layer_modules`)."""
    return name.endswith("block_sparse_moe.gate")
