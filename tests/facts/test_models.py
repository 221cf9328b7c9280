"""The names of models as people write them, and files and folders; all of it without a network."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wazn.errors import InputError, UnknownFact, Unsupported, WaznError
from wazn.facts.models import list_models, load_model, resolve_model, search_models
from wazn.facts.names import fold_model_name
from wazn.model.config import LARGEST_FILE_BYTES, supported_families

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("Llama_3.1_8B", "meta-llama/Llama-3.1-8B"),
        ("llama3.1:8b", "meta-llama/Llama-3.1-8B"),
        ("llama-3-1-8b", "meta-llama/Llama-3.1-8B"),
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("https://huggingface.co/meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("https://hf.co/meta-llama/Llama-3.1-8B/tree/main", "meta-llama/Llama-3.1-8B"),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("llama-3.1-405b", "meta-llama/Llama-3.1-405B"),
        ("mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1"),
        ("mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1"),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B"),
        ("qwen-2.5-7b", "Qwen/Qwen2.5-7B"),
        ("Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
        ("gemma-2-9b-it", "google/gemma-2-9b"),
        ("gemma-3-12b", "google/gemma-3-12b-it"),
        ("phi-1_5", "microsoft/phi-1_5"),
        ("phi-1.5", "microsoft/phi-1_5"),
        ("phi-3-mini", "microsoft/Phi-3-mini-4k-instruct"),
        ("gpt2", "openai-community/gpt2"),
        ("gpt-j-6b", "EleutherAI/gpt-j-6b"),
        ("pythia-1.4b", "EleutherAI/pythia-1.4b"),
        ("pythia-14m", "EleutherAI/pythia-14m"),
        ("falcon-7b", "tiiuae/falcon-7b"),
        ("starcoder2-7b", "bigcode/starcoder2-7b"),
        ("stablelm-2-1.6b", "stabilityai/stablelm-2-zephyr-1_6b"),
        ("internlm2_5-7b", "internlm/internlm2_5-7b-chat"),
        ("olmo-2-7b", "allenai/OLMo-2-1124-7B"),
        ("command-r", "CohereForAI/c4ai-command-r-v01"),
        ("granite-3.1-8b", "ibm-granite/granite-3.1-8b-instruct"),
        ("smollm3-3b", "HuggingFaceTB/SmolLM3-3B"),
        ("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite"),
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("tinyllama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    ],
)
def test_name(asked: str, meant: str) -> None:
    """A usual name means the catalogue's entry with that architecture."""
    source = resolve_model(asked)
    assert source.id == meant
    assert source.origin == "catalogue"


def test_every_id() -> None:
    """Every entry is found by its id in any case, and by the part after the slash unless that part is ambiguous."""
    for model in list_models():
        assert resolve_model(model.id.upper()).id == model.id
        assert resolve_model(model.id.lower()).id == model.id
        assert resolve_model(model.id.rpartition("/")[2]).id == model.id


def test_what_a_source_holds() -> None:
    """The configuration without our own remarks, and the published total: 8,030,261,248 for Llama-3.1-8B on the Hub."""
    source = resolve_model("llama-3.1-8b")
    assert source.mapping["hidden_size"] == 4096
    assert not any(key.startswith("_") for key in source.mapping)
    assert source.published_parameters == 8_030_261_248
    assert source.path.endswith("meta-llama--Llama-3.1-8B.json")
    assert source.notes == ()


def test_same_architecture_is_said() -> None:
    """A checkpoint that stands in the catalogue under another id says which entry answers for it."""
    source = resolve_model("Qwen/Qwen2.5-7B-Instruct")
    assert source.id == "Qwen/Qwen2.5-7B"
    assert [note.code for note in source.notes] == ["model-same-architecture"]
    assert source.notes[0].params == {
        "asked": "Qwen/Qwen2.5-7B-Instruct",
        "model": "Qwen/Qwen2.5-7B",
    }


def test_a_point_is_not_left_out() -> None:
    """`pythia-14b` is not `pythia-1.4b`: a point between digits means something."""
    with pytest.raises(UnknownFact) as caught:
        resolve_model("pythia-14b")
    assert "EleutherAI/pythia-1.4b" in caught.value.nearest
    assert fold_model_name("pythia-14b") != fold_model_name("pythia-1.4b")


@pytest.mark.parametrize(
    ("asked", "candidate"),
    [("mistral-7b", "mistralai/Mistral-7B-v0.3"), ("glm-4-9b", "zai-org/GLM-4-9B-0414")],
)
def test_ambiguous(asked: str, candidate: str) -> None:
    """A name of several architectures is refused with the candidates."""
    with pytest.raises(InputError, match="can mean several models") as caught:
        resolve_model(asked)
    assert candidate in str(caught.value.hint)


def test_unknown() -> None:
    """An unknown name is answered with the nearest entries."""
    with pytest.raises(UnknownFact) as caught:
        resolve_model("lama-3.1-8b")
    assert caught.value.nearest[0] == "meta-llama/Llama-3.1-8B"
    with pytest.raises(UnknownFact) as caught:
        resolve_model("zzz")
    assert "wazn models" in str(caught.value.hint)


@pytest.mark.parametrize("asked", ["", "  ", "a" * 5000, "llama\0"])
def test_no_name_at_all(asked: str) -> None:
    """What cannot be a name is refused in words."""
    with pytest.raises(InputError):
        resolve_model(asked)


@given(st.text(max_size=60).filter(lambda text: "/" not in text))
def test_any_text(text: str) -> None:
    """Whatever is typed gives a model or an error of ours, never a traceback."""
    try:
        source = resolve_model(text)
    except WaznError:
        return
    assert source.mapping


def test_folder_and_file(tmp_path: Path) -> None:
    """A folder with a config.json and the file itself give the same configuration."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    for asked in (str(tmp_path), str(path)):
        source = resolve_model(asked)
        assert source.origin == "file"
        assert source.mapping == CONFIG
        assert source.path == str(path)
        assert source.published_parameters is None
    assert load_model(str(tmp_path)).hidden_size == 64


def test_file_with_another_name(tmp_path: Path) -> None:
    """A configuration may lie under any name."""
    path = tmp_path / "my-model.json"
    path.write_text(json.dumps(CONFIG))
    assert resolve_model(str(path)).mapping == CONFIG


def test_own_code_is_not_run(tmp_path: Path) -> None:
    """`auto_map` is left alone and said."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "evil.Model"}}))
    assert [note.code for note in resolve_model(str(tmp_path)).notes] == ["model-code-not-run"]


def test_folder_without_config(tmp_path: Path) -> None:
    """A folder without config.json is named; one with an adapter says what to name instead."""
    with pytest.raises(InputError, match=r"no config\.json in"):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="holds an adapter") as caught:
        resolve_model(str(tmp_path))
    assert "base model" in str(caught.value.hint)


@pytest.mark.parametrize("asked", ["./nothing/here", "/nothing/here", "nothing.json", "a/b/c/d"])
def test_no_such_file(asked: str) -> None:
    """A path that leads nowhere is not taken for a model on the Hub."""
    with pytest.raises(InputError, match="no such file or folder"):
        resolve_model(asked)


def test_a_path_that_is_there_is_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`a/b` is a folder without a config.json or a link to nothing, and could be an id: nothing is fetched."""

    def fetch(asked: str) -> None:
        raise AssertionError(asked)

    monkeypatch.setattr("wazn.facts.hub.fetch_config", fetch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cfg" / "empty").mkdir(parents=True)
    (tmp_path / "cfg" / "dangling").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"no config\.json in cfg/empty"):
        resolve_model("cfg/empty")
    with pytest.raises(InputError, match="cfg/dangling is a link to nothing"):
        resolve_model("cfg/dangling")
    with pytest.raises(AssertionError, match="cfg/absent"):
        resolve_model("cfg/absent")


def test_pipe(tmp_path: Path) -> None:
    """A named pipe, or the shell's `<(...)`, is there but is no file: it is not opened, which could wait for ever."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InputError, match="is not a regular file"):
        resolve_model(str(tmp_path / "config.json"))


def test_large_file(tmp_path: Path) -> None:
    """A file over the limit is refused after reading the limit, whatever it holds."""
    path = tmp_path / "config.json"
    path.write_bytes(b" " * (LARGEST_FILE_BYTES + 1))
    with pytest.raises(InputError, match="larger than"):
        resolve_model(str(path))


def test_broken_file(tmp_path: Path) -> None:
    """A file that is not JSON is named with the place of the fault."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": ')
    with pytest.raises(InputError, match=r"config\.json: not valid JSON"):
        resolve_model(str(path))


def test_search() -> None:
    """A search finds by words of id and family and by names people use; without words it lists all."""
    assert len(search_models("")) == 318
    assert [model.id for model in search_models("llama 3.1 405b")] == ["meta-llama/Llama-3.1-405B"]
    assert "google/gemma-2-9b" in [model.id for model in search_models("gemma2")]
    assert [model.id for model in search_models("llama-3.1-8b-instruct")] == [
        "meta-llama/Llama-3.1-8B"
    ]
    with pytest.raises(UnknownFact):
        search_models("qwen9b")


def test_supported_is_what_can_be_read() -> None:
    """A model is listed as supported exactly when its architecture can be read."""
    families = set(supported_families())
    for model in list_models():
        try:
            load_model(model.id)
        except Unsupported:
            assert model.family not in families, model.id
        else:
            assert model.family in families, model.id


def test_sizes_that_a_file_does_not_name_are_said(tmp_path: Path) -> None:
    """`LlamaConfig()`: 32 layers of 11,008, 32 heads, vocabulary 32,000; `GPT2Config()`: 12 layers."""
    path = tmp_path / "config.json"

    def said(**config: object) -> list[object]:
        path.write_text(json.dumps(config))
        notes = resolve_model(str(path)).notes
        return [note.params["keys"] for note in notes if note.code == "config-defaults"]

    taken = (
        "num_hidden_layers 32, intermediate_size 11008, num_attention_heads 32, vocab_size 32000"
    )
    assert said(model_type="llama", hidden_size=2048) == [taken]
    assert said(**CONFIG) == []
    assert said(model_type="gpt2", n_embd=64, n_head=2, vocab_size=9) == ["n_layer 12"]
    assert said(model_type="nothing known") == []
