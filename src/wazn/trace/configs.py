"""A config.json, read by `transformers`: which model it describes, what that is trained to do, fewer layers of it.

Nothing is downloaded, and code that a checkpoint brings along (`auto_map`) is run only when a folder of it is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wazn.errors import InputError, Unsupported
from wazn.facts.names import nearest_names
from wazn.model.config import supported_families
from wazn.model.fields import MOST_LAYERS, printable
from wazn.trace.script import Script, Task

__all__ = [
    "cut_layers",
    "first_line",
    "read_hf_config",
    "resolve_task",
    "task_of",
    "text_part",
    "wanted_task",
]

# What configurations call the number of layers of a stack, where `attribute_map` does not say it.
_DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
)
# Lists that name layers by their number: `cross_attention_layers`, `mlp_only_layers`, `full_attn_idxs` ...
_NUMBERS_LAYERS = ("layers", "layer_ids", "idxs", "layer_indices", "layer_idx")
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_MASKED = ("ForMaskedLM", "ForPreTraining", "ForSequenceClassification")


def read_hf_config(mapping: Mapping[str, Any], *, code_folder: str | None = None) -> Any:
    """Return the configuration object of `transformers` for a config.json (keys that begin with `_` are remarks).

    code_folder: a local folder whose code is run where `auto_map` names it, as `trust_remote_code` runs it for types
        that transformers has itself, too.

    Raises: Unsupported for a model type that this transformers does not have; InputError for what it refuses.
    """
    import transformers

    wanted = {name: value for name, value in mapping.items() if not name.startswith("_")}
    remote = wanted.pop("auto_map", None)
    # how the checkpoint is stored; what is trained is a question of the recipe
    wanted.pop("quantization_config", None)
    model_type = wanted.pop("model_type", None)
    if not isinstance(model_type, str) or not model_type:
        raise InputError("config.json: `model_type` is missing", hint='for example "llama"')
    _refuse_too_deep(wanted)
    is_known = model_type in transformers.CONFIG_MAPPING
    if code_folder is not None and (remote or not is_known):  # `trust_remote_code` goes before
        return _own_code(model_type, remote, code_folder, num_labels=wanted.get("num_labels"))
    if not is_known:
        raise _unknown_type(model_type, has_code=bool(remote))
    try:
        config = transformers.AutoConfig.for_model(model_type, **wanted)
    except Exception as error:  # any of its validators; a wrong value stops it anywhere
        raise InputError(
            f"config.json: transformers {transformers.__version__} refuses this `{model_type}`: {first_line(error)}"
        ) from error
    _complete(config)
    return config


def _refuse_too_deep(mapping: Mapping[str, Any], path: str = "") -> None:
    """Raises: InputError for more layers than any model has; each would be listed and built, one by one."""
    for name, value in mapping.items():
        is_depth = name in (*_DEPTHS, "n_layer", "n_layers")
        if isinstance(value, dict):
            _refuse_too_deep(value, f"{path}{name}.")
        elif is_depth and isinstance(value, int) and value > MOST_LAYERS:
            raise InputError(
                f"config.json: `{path}{name}` must be at most {MOST_LAYERS}, found `{value}`"
            )


def _own_code(model_type: str, remote: Any, folder: str, *, num_labels: Any) -> Any:
    """Read a configuration with the checkpoint's own code, which lies in `folder` and nowhere else.

    Source: `has_remote_code and trust_remote_code` in transformers/models/auto/configuration_auto.py.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if not Path(folder).is_dir():
        raise InputError(
            f"`--trust-remote-code` runs code of a local folder only; {folder} is none"
        )
    classes = remote.values() if isinstance(remote, dict) else ()
    elsewhere = [name for name in classes if "--" in str(name)]
    if elsewhere or not classes:
        raise Unsupported(
            f"the code of `{model_type}` is not in {folder}: "
            + (
                f"`auto_map` names `{elsewhere[0]}`"
                if elsewhere
                else "config.json has no `auto_map`"
            ),
            hint="without `--trust-remote-code` the class that transformers has is rehearsed"
            if model_type in CONFIG_MAPPING
            else None,
        )
    try:
        config = AutoConfig.from_pretrained(
            folder,
            trust_remote_code=True,
            local_files_only=True,
            **({} if num_labels is None else {"num_labels": num_labels}),
        )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody's own code can raise anything, `SystemExit` too
        raise InputError(
            f"the configuration's own code in {folder} stopped: {first_line(error)}"
        ) from error
    vars(config).pop("quantization_config", None)
    _complete(config)
    return config


def _unknown_type(model_type: str, *, has_code: bool) -> Unsupported:
    import transformers

    message = f"transformers {transformers.__version__} has no model type `{printable(model_type)}`"
    if has_code:
        return Unsupported(
            f"{message}; the checkpoint brings its own code, which is not run",
            hint="`--trust-remote-code` runs it, if MODEL is a local folder with the code in it",
        )
    if model_type in supported_families():
        return Unsupported(message, hint="`wazn estimate --engine simulate` counts it")
    known = nearest_names(model_type[:60], list(transformers.CONFIG_MAPPING), at_most=3)
    near = ", ".join(f"`{name}`" for name in known)
    return Unsupported(
        message, hint=f"a newer transformers may have it{f'; alike are {near}' if near else ''}"
    )


def _complete(config: Any) -> None:
    """Name the token with which a decoder begins, which configurations may leave to the checkpoint's generation
    settings; it costs no memory.
    """
    if getattr(config, "is_encoder_decoder", False) and (
        getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0


def text_part(config: Any) -> Any:
    """Return the part of a configuration that describes the language model (its decoder, if it has two)."""
    if not hasattr(config, "get_text_config"):  # since transformers 4.45
        return config
    try:
        part = config.get_text_config()
    except ValueError:  # both an encoder's and a decoder's
        part = config.get_text_config(decoder=True)
    return config if isinstance(part, dict) else part  # a name that the class does not know


def resolve_task(mapping: Mapping[str, Any], script: Script) -> Task:
    """Return what a script trains a model to do: what it says, else what the configuration is for."""
    return wanted_task(read_hf_config(mapping, code_folder=script.code_folder), script)


def wanted_task(config: Any, script: Script) -> Task:
    """Return the same for a configuration that is read. Raises: InputError for images in a task without."""
    if not script.num_images:
        return script.task or task_of(config)
    if script.task not in (None, Task.IMAGE_TEXT):
        raise InputError(f"`--images` needs `--task image-text`, found `--task {script.task}`")
    return Task.IMAGE_TEXT


def task_of(config: Any) -> Task:
    """Return what a model is usually trained to do: what its `architectures` say, a causal language model first.

    Raises: Unsupported where transformers has no class for any of the tasks.
    """
    from transformers.models.auto import modeling_auto as auto

    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    seq2seq = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    classification = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    masked = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    image_text = getattr(auto, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", {})  # since 4.45
    name, text = config.model_type, str(text_part(config).model_type)
    classes = getattr(config, "architectures", None)
    built = str(classes[0]) if isinstance(classes, list) and classes else ""
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return Task.CAUSAL_LM
    if text in causal and built.endswith(_CAUSAL):
        return Task.CAUSAL_LM
    if name in classification and built.endswith(_MASKED):
        return Task.SEQUENCE_CLASSIFICATION
    if name in seq2seq and getattr(config, "is_encoder_decoder", False):
        return Task.SEQ2SEQ
    if name in classification and name in masked and not getattr(config, "is_decoder", False):
        return Task.SEQUENCE_CLASSIFICATION
    if text in causal:
        return Task.CAUSAL_LM
    if name in image_text:
        return Task.IMAGE_TEXT
    if name in classification:
        return Task.SEQUENCE_CLASSIFICATION
    raise Unsupported(
        f"transformers has no class for `{name}` that is trained on text",
        hint="rehearsed are causal language models, image-text models, seq2seq and sequence classification",
    )


def cut_layers(config: Any, num_layers: int) -> None:
    """Leave the first `num_layers` layers of the language model (of encoder and decoder, where both are there).

    What is said of each layer is cut along: lists and patterns as long as the stack, lists of layers' numbers, the
    count of last layers that share keys and values. Towers for images and sound stay whole.
    """
    for part in {id(part): part for part in (config, text_part(config))}.values():
        _cut(part, num_layers)


def _cut(config: Any, num_layers: int) -> None:
    names = getattr(type(config), "attribute_map", {})
    said = {name: getattr(config, name, None) for name in {names.get(n, n) for n in _DEPTHS}}
    depths = {
        name: value for name, value in said.items() if isinstance(value, int) and value > num_layers
    }
    if not depths:
        return
    before = getattr(config, "num_hidden_layers", max(depths.values()))
    for name, value in vars(config).copy().items():
        if _is_per_layer(name, value, set(depths.values())):
            setattr(config, name, value[:num_layers])
        elif _numbers_layers(name, value):
            setattr(config, name, type(value)(item for item in value if item < num_layers))
    # the last layers that take keys and values of earlier ones: Gemma 3n, Gemma 4
    shared = getattr(config, "num_kv_shared_layers", None)
    if isinstance(shared, int):
        config.num_kv_shared_layers = max(0, shared - (before - num_layers))
    for name in depths:
        if name in vars(config):  # some count the list of layers instead
            setattr(config, name, num_layers)


def _is_per_layer(name: str, value: Any, depths: set[int]) -> bool:
    if isinstance(value, str):
        return name.endswith("pattern") and len(value) in depths
    return isinstance(value, list | tuple) and len(value) in depths


def _numbers_layers(name: str, value: Any) -> bool:
    is_named_so = isinstance(value, list | tuple) and name.endswith(_NUMBERS_LAYERS)
    return is_named_so and all(type(item) is int for item in value)


def first_line(error: BaseException) -> str:
    """Return what an error says, the most telling line of it, cut to a readable length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]
