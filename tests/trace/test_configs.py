"""A config.json as transformers reads it: what it is trained for, fewer layers of it, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from wazn.errors import InputError, Unsupported
from wazn.facts.models import resolve_model
from wazn.trace.configs import cut_layers, read_hf_config, resolve_task, task_of, text_part
from wazn.trace.script import Script, Task


def _catalogue(model: str) -> Any:
    return read_hf_config(resolve_model(model).mapping)


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("meta-llama/Llama-3.1-8B", Task.CAUSAL_LM),
        ("google-bert/bert-base-cased", Task.SEQUENCE_CLASSIFICATION),
        ("microsoft/deberta-v3-base", Task.SEQUENCE_CLASSIFICATION),
        ("google/flan-t5-base", Task.SEQ2SEQ),
        ("facebook/bart-base", Task.SEQ2SEQ),
        ("google/gemma-3-12b-it", Task.CAUSAL_LM),  # its language model has a class of its own
        ("llava-hf/llava-1.5-13b-hf", Task.CAUSAL_LM),  # and this one's is a Llama
        ("Qwen/Qwen2-VL-2B-Instruct", Task.IMAGE_TEXT),  # this one's has none
    ],
)
def test_what_a_model_is_usually_trained_for(model: str, task: Task) -> None:
    """By its `architectures` and by the classes that transformers has, a causal language model first."""
    assert task_of(_catalogue(model)) is task


@pytest.mark.parametrize("named", [7, True, [3], {"a": 1}, [], None])
def test_an_absurd_name_of_a_class_says_nothing(named: Any) -> None:
    """A Llama is a causal language model whatever stands there."""
    config = read_hf_config({"model_type": "llama"})
    config.architectures = named
    assert task_of(config) is Task.CAUSAL_LM


def test_what_the_script_says_comes_first() -> None:
    """A Llama can be trained to classify."""
    mapping = resolve_model("meta-llama/Llama-3.1-8B").mapping
    script = Script(task=Task.SEQUENCE_CLASSIFICATION)
    assert resolve_task(mapping, script) is Task.SEQUENCE_CLASSIFICATION


def test_images_make_it_an_image_text_model() -> None:
    """Whatever else the model is for; another task is a contradiction."""
    mapping = resolve_model("google/gemma-3-12b-it").mapping
    assert resolve_task(mapping, Script(num_images=1)) is Task.IMAGE_TEXT
    with pytest.raises(InputError, match="--task causal-lm"):
        resolve_task(mapping, Script(num_images=1, task=Task.CAUSAL_LM))


def test_what_nothing_trains_on_text_is_refused() -> None:
    """ViT has neither a language model nor a classifier of sequences."""
    with pytest.raises(Unsupported, match="`vit`"):
        task_of(read_hf_config({"model_type": "vit"}))


@pytest.mark.parametrize(
    ("model", "num_layers", "name", "left"),
    [
        # lists with an entry for each layer keep their first ones
        (
            "google/gemma-2-2b",
            3,
            "layer_types",
            ["sliding_attention", "full_attention", "sliding_attention"],
        ),
        # lists of layers' numbers keep those that are there
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", 9, "cross_attention_layers", [3, 8]),
        # 35 layers, the last 15 take keys and values of earlier ones: of the first 22, two do
        ("google/gemma-3n-E4B-it", 22, "num_kv_shared_layers", 2),
        ("google/gemma-3n-E4B-it", 10, "num_kv_shared_layers", 0),
        # counts a list of layers' kinds
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 4, "num_hidden_layers", 4),
        ("state-spaces/mamba-1.4b-hf", 2, "num_hidden_layers", 2),
        ("openai-community/gpt2", 2, "n_layer", 2),
        ("tiiuae/falcon-7b", 2, "num_hidden_layers", 2),
    ],
)
def test_the_first_layers_are_left(model: str, num_layers: int, name: str, left: Any) -> None:
    """With everything that the configuration says of each."""
    config = _catalogue(model)
    cut_layers(config, num_layers)
    assert getattr(text_part(config), name) == left


def test_encoder_and_decoder_are_cut_and_towers_stay() -> None:
    """T5 says `num_layers` and `num_decoder_layers`, BART `encoder_layers` and `decoder_layers`; CLIP keeps its 24."""
    t5, bart = _catalogue("google/flan-t5-base"), _catalogue("facebook/bart-base")
    llava = _catalogue("llava-hf/llava-1.5-13b-hf")
    for config in (t5, bart, llava):
        cut_layers(config, 3)
    assert (t5.num_layers, t5.num_decoder_layers) == (3, 3)
    assert (bart.encoder_layers, bart.decoder_layers) == (3, 3)
    assert llava.text_config.num_hidden_layers == 3
    assert llava.vision_config.num_hidden_layers == 24


def test_more_layers_than_there_are_change_nothing() -> None:
    """A model of 12 layers stays one."""
    config = _catalogue("openai-community/gpt2")
    cut_layers(config, 100)
    assert config.n_layer == 12


def test_words_that_are_as_long_as_the_stack_are_kept() -> None:
    """`attention_type="block_sparse"` has 12 letters, and BigBird 12 layers."""
    config = read_hf_config({"model_type": "big_bird"})
    cut_layers(config, 2)
    assert config.attention_type == "block_sparse"


def test_a_type_that_transformers_does_not_have_is_refused() -> None:
    """With names that are alike, with the engine that counts it, or with the way to run the checkpoint's own code."""
    with pytest.raises(Unsupported, match=r"no model type `llamma`(?s:.*)`llama`"):
        read_hf_config({"model_type": "llamma"})
    with pytest.raises(Unsupported, match="--engine simulate"):
        read_hf_config({"model_type": "baichuan"})
    with pytest.raises(Unsupported, match="--trust-remote-code"):
        read_hf_config({"model_type": "baichuan", "auto_map": {"AutoConfig": "c.Config"}})


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"model_type": ["llama"]},
        {"model_type": "llama", "hidden_size": "wide"},
        {"model_type": "llama", "num_attention_heads": 0},
        {"model_type": "qwen2_vl", "vision_config": 7},
    ],
)
def test_what_transformers_refuses_is_a_wrong_question(mapping: dict[str, Any]) -> None:
    """Whatever its validators raise."""
    with pytest.raises(InputError, match=r"config\.json"):
        read_hf_config(mapping)


@pytest.mark.parametrize(
    ("mapping", "name"),
    [
        ({"model_type": "gpt2", "n_layer": 10**6}, "n_layer"),
        ({"model_type": "qwen2", "num_hidden_layers": 10**9}, "num_hidden_layers"),
        (
            {"model_type": "llava", "text_config": {"num_hidden_layers": 513}},
            r"text_config\.num_hidden_layers",
        ),
    ],
)
def test_a_model_deeper_than_any_is_a_wrong_question(mapping: dict[str, Any], name: str) -> None:
    """A billion layers would be listed and built one by one."""
    with pytest.raises(InputError, match=f"`{name}` must be at most 512"):
        read_hf_config(mapping)


_OWN_CONFIG = """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own"
"""


def test_own_code_runs_from_a_local_folder_only(tmp_path: Any) -> None:
    """With `auto_map` into that folder; what names another repository, or no folder, is refused."""
    mapping = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "configuration_own.py").write_text(_OWN_CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(mapping))
    with pytest.raises(Unsupported, match="not run"):
        read_hf_config(mapping)
    assert type(read_hf_config(mapping, code_folder=str(tmp_path))).__name__ == "OwnConfig"
    with pytest.raises(InputError, match="local folder"):
        read_hf_config(mapping, code_folder="someone/own")
    elsewhere = {**mapping, "auto_map": {"AutoConfig": "someone/own--configuration_own.OwnConfig"}}
    with pytest.raises(Unsupported, match="someone/own--"):
        read_hf_config(elsewhere, code_folder=str(tmp_path))


def test_own_code_that_leaves_the_program_is_refused(tmp_path: Any) -> None:
    """`SystemExit` is no `Exception`; the program goes on to say what happened."""
    mapping = {"model_type": "leaves", "auto_map": {"AutoConfig": "configuration_leaves.Config"}}
    (tmp_path / "configuration_leaves.py").write_text("raise SystemExit(7)")
    (tmp_path / "config.json").write_text(json.dumps(mapping))
    with pytest.raises(InputError, match="own code"):
        read_hf_config(mapping, code_folder=str(tmp_path))


def test_a_part_that_the_class_does_not_know_is_no_part() -> None:
    """A Llama has no `text_config`: what a config.json says there stays a dictionary."""
    config = read_hf_config({"model_type": "llama", "text_config": {"model_type": "llama"}})
    assert text_part(config) is config


def test_own_code_goes_before_a_class_of_the_same_type(tmp_path: Any) -> None:
    """Trusted code is run for a `llama` too, and not without the word: `has_remote_code and trust_remote_code` in
    configuration_auto.py.
    """
    mapping = {"model_type": "llama", "auto_map": {"AutoConfig": "configuration_own_llama.Own"}}
    (tmp_path / "configuration_own_llama.py").write_text(
        "from transformers import LlamaConfig\n\nclass Own(LlamaConfig):\n    pass\n"
    )
    (tmp_path / "config.json").write_text(json.dumps(mapping))
    assert type(read_hf_config(mapping)).__name__ == "LlamaConfig"
    assert type(read_hf_config(mapping, code_folder=str(tmp_path))).__name__ == "Own"
    del mapping["auto_map"]
    assert type(read_hf_config(mapping, code_folder=str(tmp_path))).__name__ == "LlamaConfig"
