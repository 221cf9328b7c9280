"""What LoRA adapts: textbook numbers, peft's odd rules, and what is refused."""

from __future__ import annotations

import pytest

from tests.model.catalogue import configurations
from wazn.errors import InputError
from wazn.model.config import read_config
from wazn.model.lora import (
    Adapted,
    TargetKind,
    adapted,
    attention_targets,
    check_adapter,
    count_lora_parameters,
    lora_parameters,
)
from wazn.model.spec import ModelSpec
from wazn.model.trainable import saved_copies, trainable_parameters


def _spec(name: str) -> ModelSpec:
    return read_config(configurations()[name], id=name, path=f"{name}.json")


LLAMA = _spec("meta-llama--Llama-2-7b-hf")
MIXTRAL = _spec("mistralai--Mixtral-8x7B-v0.1")
DEEPSEEK = _spec("deepseek-ai--DeepSeek-V2-Lite")


def _names(found: Adapted) -> list[str]:
    return list(dict.fromkeys(target.name for target in found.everything()))


def test_textbook() -> None:
    """Rank 8 on queries and values of Llama 2 7B: 65,536 per adapter, 4,194,304 in all."""
    found = adapted(LLAMA, "q_proj,v_proj")
    assert found.layers[0][0].num_parameters(rank=8) == 65_536
    assert count_lora_parameters(found, rank=8) == 4_194_304


def test_all_linear_leaves_the_head_out() -> None:
    """`all-linear` is seven matrices in each of 32 layers, and nothing outside them; capitals do not matter."""
    found = adapted(LLAMA, "All-Linear")
    assert len(_names(found)) == 7
    assert sum(len(layer) for layer in found.layers) == 7 * 32
    assert (found.before, found.after) == ((), ())
    # 39,976,960 for rank 16: peft's own count for Llama 2 7B
    assert count_lora_parameters(found, rank=16) == 39_976_960


def test_attention_means_the_attention_of_the_family() -> None:
    """GPT-2's `c_proj` is in both branches; `attention` takes the one of attention only."""
    gpt2 = _spec("openai-community--gpt2")
    assert attention_targets(gpt2) == ("attn.c_attn", "attn.c_proj")
    assert _names(adapted(gpt2, "attention")) == ["attn.c_attn", "attn.c_proj"]
    assert _names(adapted(gpt2, "c_proj")) == ["attn.c_proj", "mlp.c_proj"]
    assert attention_targets(DEEPSEEK) == (
        "self_attn.q_proj",
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.kv_b_proj",
        "self_attn.o_proj",
    )


def test_a_name_matches_at_the_end_and_at_a_dot() -> None:
    """`q_proj` is the end of `self_attn.q_proj`; `roj` is the end of many names and matches none."""
    assert _names(adapted(LLAMA, ["self_attn.q_proj"])) == ["self_attn.q_proj"]
    with pytest.raises(InputError):
        adapted(LLAMA, ["roj"])


def test_a_name_with_a_layer_number_adapts_that_layer() -> None:
    """`layers.3.self_attn.q_proj` adapts one layer of 32; the others are empty."""
    found = adapted(LLAMA, "layers.3.self_attn.q_proj")
    assert [len(layer) for layer in found.layers] == [0, 0, 0, 1] + [0] * 28


def test_regular_expressions_match_whole_names() -> None:
    """Text with a metacharacter is a pattern for the full name, as in peft."""
    assert _names(adapted(LLAMA, r".*\.(q|k)_proj")) == ["self_attn.q_proj", "self_attn.k_proj"]
    found = adapted(LLAMA, r"model\.layers\.(0|31)\..*down_proj")
    assert [i for i, layer in enumerate(found.layers) if layer] == [0, 31]
    with pytest.raises(InputError, match="match no linear"):
        adapted(LLAMA, r"q_proj.*")


def test_wrong_patterns_are_refused() -> None:
    """A pattern that does not compile, or is longer than any needs to be, gives an `InputError`."""
    with pytest.raises(InputError, match="neither a list of names nor a regular expression"):
        adapted(LLAMA, "(q_proj")
    with pytest.raises(InputError, match="may have 1000 characters"):
        adapted(LLAMA, "x*" * 1000)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w+\.?)+X",  # runs for hours on `model.layers.0.self_attn.q_proj`
        r"(\w*){30}X",
        r"(?:\w{1,20}\.?){1,20}X",
        r".*.*?.+.+?.{0,}.{0,9}X",
        r"\w?" * 40 + "X",
        r"[)]*(a|b)*",
    ],
)
def test_a_pattern_that_may_never_end_is_refused(pattern: str) -> None:
    """Python's `re` backtracks: what could try exponentially many ways is not tried at all."""
    with pytest.raises(InputError, match="may take for ever to match"):
        adapted(LLAMA, pattern)


def test_patterns_of_real_recipes_are_taken() -> None:
    """Signs inside classes and escapes are no repeats, groups may be optional; unsloth's pattern has five repeats."""
    unsloth = (
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp).*?(?:q_proj|v_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp)\.(?:(?:q_proj|v_proj)))"
    )
    for pattern in (unsloth, r"model\.layers\.\d+\.(self_attn)?\.?[)*+]?(q|v)_proj"):
        assert _names(adapted(LLAMA, pattern)) == ["self_attn.q_proj", "self_attn.v_proj"]


@pytest.mark.filterwarnings("error")
def test_a_pattern_that_python_warns_of_is_quiet() -> None:
    """A POSIX class means something else to Python, which says so on stderr; peft compiles it all the same."""
    with pytest.raises(InputError, match="match no linear"):
        adapted(LLAMA, "[[:alpha:]]")


@pytest.mark.parametrize("targets", ["query_key_value", ("c_attn", "c_proj"), "", ",", ()])
def test_targets_that_match_nothing_list_what_there_is(targets: str | tuple[str, ...]) -> None:
    """Nothing matched: the error names the linears of this model."""
    with pytest.raises(InputError, match="match no linear of") as refusal:
        adapted(LLAMA, targets)
    assert refusal.value.hint is not None
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in refusal.value.hint


def test_names_that_match_nothing_beside_others_are_kept() -> None:
    """peft ignores a name that matches nothing where another matches; it is kept for a note."""
    found = adapted(LLAMA, "q_proj,query_key_value")
    assert (_names(found), found.unmatched) == (["self_attn.q_proj"], ("query_key_value",))


def test_norms_and_stacked_experts_are_no_targets() -> None:
    """LoRA adapts linears and embeddings; a norm or a module of stacked experts is refused, as peft refuses it."""
    with pytest.raises(InputError, match="`input_layernorm` is neither"):
        adapted(LLAMA, "q_proj,input_layernorm")
    with pytest.raises(InputError, match=r"`model\.norm` is neither"):
        adapted(LLAMA, "q_proj,model.norm")
    with pytest.raises(InputError, match=r"`mlp\.experts` is neither"):
        adapted(_spec("openai--gpt-oss-20b"), "experts")


def test_embedding_and_head() -> None:
    """An embedding [V, H] gets A [r, V] and B [H, r], a head like any linear; both are named for it only."""
    found = adapted(LLAMA, "q_proj,embed_tokens,lm_head")
    (embedding,), (head,) = found.before, found.after
    assert embedding.kind is TargetKind.EMBEDDING
    assert [(p.name, p.shape) for p in lora_parameters(embedding, rank=8)] == [
        ("model.embed_tokens.lora_embedding_A.default", (8, 32000)),
        ("model.embed_tokens.lora_embedding_B.default", (4096, 8)),
    ]
    assert head.num_parameters(rank=8) == 8 * (4096 + 32000)


def test_dora_adds_a_magnitude_per_row() -> None:
    """DoRA keeps one number per output: 4096 for each of q, k, v and o in 32 layers."""
    found = adapted(LLAMA, "attention")
    plain = count_lora_parameters(found, rank=8)
    assert count_lora_parameters(found, rank=8, dora=True) - plain == 32 * 4 * 4096
    shapes = [p.shape for p in lora_parameters(found.layers[0][0], rank=8, dora=True)]
    assert shapes == [(8, 4096), (4096, 8), (4096,)]


def test_all_linear_reaches_stacked_experts_of_some_families() -> None:
    """In Mixtral peft 0.21 adapts router and both tensors of experts, gate and up with twice the rank."""
    found = adapted(MIXTRAL, "all-linear")
    gate, gate_up, down = (t for t in found.layers[0] if t.kind is TargetKind.PARAMETER)
    assert (gate.name, gate.experts) == ("mlp.gate.weight", 1)
    assert (gate_up.name, gate_up.experts, gate_up.rank_multiple) == (
        "mlp.experts.gate_up_proj",
        8,
        2,
    )
    assert down.num_parameters(rank=8) == 8 * 8 * (14336 + 4096)
    # 359,665,664 for rank 16: peft's own count
    assert count_lora_parameters(found, rank=16) == 359_665_664


def test_all_linear_drops_dense_and_shared_feed_forwards_there() -> None:
    """DeepSeek's dense first layer and its shared experts have the experts' old names, and lose their adapters."""
    found = adapted(DEEPSEEK, "all-linear")
    assert [t.name for t in found.layers[0]] == list(attention_targets(DEEPSEEK))
    assert not any("shared" in name for name in _names(found))
    listed = adapted(DEEPSEEK, "all-linear", fused_experts=False)
    assert any("shared_experts" in name for name in _names(listed))
    assert len(listed.layers[0]) == 4 + 3


def test_all_linear_leaves_experts_alone_elsewhere() -> None:
    """gpt-oss and Qwen2-MoE: only what is a linear; the latter's shared expert and its gate are."""
    oss = adapted(_spec("openai--gpt-oss-20b"), "all-linear")
    assert {t.kind for t in oss.everything()} == {TargetKind.LINEAR}
    assert len(_names(oss)) == 4
    qwen = _names(adapted(_spec("Qwen--Qwen1.5-MoE-A2.7B"), "all-linear"))
    assert "mlp.shared_expert_gate" in qwen
    assert "mlp.gate" not in qwen


def test_old_names_of_experts_need_both_halves() -> None:
    """`w1` and `w3` are one tensor in transformers 5: one without the other is refused, as peft refuses it."""
    with pytest.raises(InputError, match="`w1` cannot be adapted without `w3`"):
        adapted(MIXTRAL, "q_proj,w1")
    assert _names(adapted(MIXTRAL, "w1,w3")) == ["mlp.experts.gate_up_proj"]
    assert len(_names(adapted(MIXTRAL, "w1", fused_experts=False))) == 8


def test_experts_of_transformers_4_are_linears() -> None:
    """With modules per expert, `all-linear` adapts 4 + 1 + 24 matrices of a Mixtral layer."""
    found = adapted(MIXTRAL, "all-linear", fused_experts=False)
    assert len(found.layers[0]) == 29
    assert {t.kind for t in found.everything()} == {TargetKind.LINEAR}


def test_rank_above_the_matrix_is_refused() -> None:
    """Gemma 2B has one key head of 256: a rank of 512 is no low rank. A router's few rows do not count."""
    gemma = _spec("google--gemma-2b")
    check_adapter(adapted(gemma, "attention"), rank=256)
    with pytest.raises(InputError, match=r"a rank of 512 is above that of `self_attn\.k_proj`"):
        check_adapter(adapted(gemma, "attention"), rank=512)
    check_adapter(adapted(MIXTRAL, "all-linear"), rank=64)  # its router has 8 rows
    for rank in (0, -8):
        with pytest.raises(InputError, match="must be a positive integer"):
            check_adapter(adapted(LLAMA, "attention"), rank=rank)


def test_stacked_experts_have_neither_dora_nor_dropout() -> None:
    """peft raises for both on parameters; attention alone has both."""
    experts, attention = adapted(MIXTRAL, "all-linear"), adapted(MIXTRAL, "attention")
    with pytest.raises(InputError, match="peft has no DoRA on the stacked experts"):
        check_adapter(experts, rank=8, dora=True)
    with pytest.raises(InputError, match="peft has no dropout on the stacked experts"):
        check_adapter(experts, rank=8, dropout=0.1)
    check_adapter(attention, rank=8, dora=True, dropout=0.1)


def test_saved_modules_are_copied_and_never_adapted() -> None:
    """A tied head in `modules_to_save` becomes a matrix of its own; what is saved gets no adapter."""
    qwen = _spec("Qwen--Qwen2-0.5B")
    saved = saved_copies(qwen, ["embed_tokens", "lm_head"])
    assert [(p.name, p.shape) for p in saved] == [
        ("model.embed_tokens.modules_to_save.default.weight", (151936, 896)),
        ("lm_head.modules_to_save.default.weight", (151936, 896)),
    ]
    found = adapted(qwen, "all-linear", modules_to_save=["mlp"])
    assert all(t.name.startswith("self_attn.") for t in found.everything())
    with pytest.raises(InputError, match="`wte` is the end of no module's name"):
        saved_copies(qwen, ["embed_tokens", "wte"])


def test_saved_modules_match_the_end_of_a_name() -> None:
    """peft asks for the end of the name without a dot: `norm` copies the norms of every layer too."""
    names = [p.name for p in saved_copies(LLAMA, ["norm"])]
    assert len(names) == 2 * 32 + 1
    assert names[0] == "model.layers.0.input_layernorm.modules_to_save.default.weight"


def test_what_is_trained_stands_in_the_order_of_the_model() -> None:
    """Adapters and copies come in the order of the weights that they stand beside, however they were asked for."""
    found = adapted(LLAMA, "o_proj,q_proj,lm_head", modules_to_save=["embed_tokens"])
    saved = saved_copies(LLAMA, ["embed_tokens"])
    trained = [p.name for p in trainable_parameters(LLAMA, found, rank=8, saved=saved)]
    assert trained[:3] == [
        "model.embed_tokens.modules_to_save.default.weight",
        "model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "model.layers.0.self_attn.q_proj.lora_B.default.weight",
    ]
    assert trained[-1] == "lm_head.lora_B.default.weight"
    assert len(trained) == 1 + 32 * 4 + 2
