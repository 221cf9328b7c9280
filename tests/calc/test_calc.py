"""The textbook formulas: the textbooks' own numbers, and the questions that have no answer."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wazn import calc
from wazn.errors import InputError, UnknownFact
from wazn.facts.models import load_model

B = 10**9
GB = 10**9


def test_seven_billion_parameters_at_sixteen_bytes_hold_112_gb() -> None:
    """7 x 16 = 112 (ZeRO, section 3.1: 2 + 2 + 12), and 20 GB of activations make 132."""
    result = calc.training(num_parameters=7 * B, bytes_per_parameter=16)
    assert result.states_bytes == result.peak_bytes == 112 * GB
    result = calc.training(num_parameters=7 * B, bytes_per_parameter=16, activation_bytes=20 * GB)
    assert result.peak_bytes == 132 * GB


def test_adam_splits_its_sixteen_bytes_as_zero_does() -> None:
    """2 weight, 2 gradient, 4 master copy, 4 momentum, 4 variance; K = 12 of them optimizer state."""
    rule = calc.optimizer_rule("adam")
    assert rule.rule_of_thumb == 16
    (split,) = rule.splits
    assert [(part.code, part.bytes_per_parameter) for part in split.parts] == [
        ("weights", 2),
        ("gradients", 2),
        ("master-weights", 4),
        ("momentum", 4),
        ("variance", 4),
    ]
    assert split.bytes_per_parameter == 16
    assert split.optimizer_bytes_per_parameter == 12


def test_gpt2_in_the_zero_paper() -> None:
    """ "GPT-2 with 1.5 billion parameters ... requires at least 24 GB", 3 GB of which are fp16 weights."""
    result = calc.training(num_parameters=15 * 10**8, optimizer="adam")
    assert result.peak_bytes == 24 * GB
    assert result.rule is not None
    weights = result.rule.splits[0].parts[0]
    assert weights.code == "weights"
    assert result.num_parameters * weights.bytes_per_parameter == 3 * GB


def test_the_optimizer_state_of_seven_billion_parameters() -> None:
    """12 x 7 = 84 GB."""
    (split,) = calc.optimizer_rule("adam").splits
    assert 7 * B * split.optimizer_bytes_per_parameter == 84 * GB


def test_eight_bit_adam_by_rule_and_by_count() -> None:
    """The rule says 12; 2 + 2 + 4 + 1 + 1 = 10, and two fp32 scales per 256 elements are 1/32 byte."""
    result = calc.training(num_parameters=7 * B, optimizer="adam-8bit")
    assert result.bytes_per_parameter == 12
    assert result.peak_bytes == 84 * GB
    (split,) = calc.optimizer_rule("adam-8bit").splits
    constants = {part.code: part.bytes_per_parameter for part in split.parts}["block-constants"]
    assert split.bytes_per_parameter - constants == 10
    assert constants == Fraction(2 * 4, 256)


def test_sgd_with_momentum_by_rule_and_by_count() -> None:
    """The rule says 8: 2 + 2 + 4 without a master copy; with one it is 12."""
    result = calc.training(num_parameters=7 * B, optimizer="sgd-momentum")
    assert result.peak_bytes == 56 * GB
    without, with_master = calc.optimizer_rule("sgd-momentum").splits
    assert (without.code, without.bytes_per_parameter) == ("without-master-copy", 8)
    assert (with_master.code, with_master.bytes_per_parameter) == ("with-master-copy", 12)


def test_eight_bit_states_in_the_real_library_have_blocks_of_256() -> None:
    """bitsandbytes makes one fp32 scale per 256 elements and state, as the split counts them."""
    torch = pytest.importorskip("torch")
    bnb = pytest.importorskip("bitsandbytes")
    weight = torch.nn.Parameter(torch.zeros(4096, 16))
    optimizer = bnb.optim.AdamW8bit([weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.init_state(optimizer.param_groups[0], weight, 0, 0)
    state = optimizer.state[weight]
    for number in ("1", "2"):
        assert state[f"state{number}"].dtype == torch.uint8
        assert state[f"absmax{number}"].dtype == torch.float32
        assert state[f"absmax{number}"].numel() * 256 == weight.numel()


@pytest.mark.parametrize(("replicas", "effective"), [(1, 32), (4, 128)])
def test_accumulation_grows_the_batch_and_not_the_activations(
    replicas: int, effective: int
) -> None:
    """4 x 8 x 1 = 32 and 4 x 8 x 4 = 128; 4 samples of 0.5 GB are 2 GB either way."""
    result = calc.accumulation(
        micro_batch=4, steps=8, replicas=replicas, activation_per_sample_bytes=GB // 2
    )
    assert result.effective_batch == effective
    assert result.peak_activation_bytes == 2 * GB


def test_accumulation_says_what_it_keeps() -> None:
    """More than one step keeps the gradients alive; a single step does not accumulate."""
    one = calc.accumulation(micro_batch=4, steps=1, activation_per_sample_bytes=GB)
    two = calc.accumulation(micro_batch=4, steps=2, activation_per_sample_bytes=GB)
    assert one.notes == ()
    assert two.notes == ("accumulation-keeps-gradients",)


def test_lora_on_query_and_value_of_a_7b_model() -> None:
    """8 x (4096 + 4096) = 65,536; x 2 x 32 = 4,194,304; of 7 x 10^9 that is 0.06 %."""
    result = calc.lora(rank=8, layers=32, hidden=4096, modules=("q", "v"), num_parameters=7 * B)
    assert [adapter.num_parameters for adapter in result.adapters] == [65_536, 65_536]
    assert result.num_trainable == 4_194_304
    assert result.trainable_fraction == Fraction(4_194_304, 7 * B)
    assert round(result.trainable_fraction * 100, 2) == Fraction(6, 100)


def test_lora_on_every_matrix_of_llama_3_8b() -> None:
    """Rank 16 on all seven: 41,943,040, as `print_trainable_parameters()` of peft says for Llama-3-8B."""
    result = calc.lora(
        rank=16,
        layers=32,
        hidden=4096,
        kv_hidden=1024,
        intermediate=14_336,
        modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    )
    assert result.num_trainable == 41_943_040


def test_qlora_weights_of_a_7b_model() -> None:
    """7 x 10^9 x 4 / 8 = 3.5 GB."""
    assert calc.qlora(num_parameters=7 * B).weights_bytes == 35 * 10**8


def test_quantization_constants_as_in_the_qlora_paper() -> None:
    """ "32/64 = 0.5 bits per parameter"; double: "8/64 + 32/(64 . 256) = 0.127 bits" (section 3)."""
    result = calc.qlora(num_parameters=7 * B)
    assert result.constant_bits_per_parameter == Fraction(1, 2)
    assert result.double_constant_bits_per_parameter == Fraction(8, 64) + Fraction(32, 64 * 256)
    assert round(result.double_constant_bits_per_parameter, 3) == Fraction(127, 1000)
    assert result.constants_bytes == 437_500_000
    assert result.double_constants_bytes == 111_083_985  # 7e9 x 0.126953125 / 8, rounded up


def test_inference_in_sixteen_bits() -> None:
    """7 x 10^9 x 2 = 14 GB of weights; the cache comes on top."""
    result = calc.inference(num_parameters=7 * B, bits=16)
    assert result.weights_bytes == result.total_bytes == 14 * GB
    assert result.notes == ("kv-cache-not-asked-for",)
    cache = calc.kv_cache(layers=32, kv_heads=8, head_dim=128, tokens=8192, sequences=4)
    result = calc.inference(num_parameters=7 * B, bits=16, cache=cache)
    assert result.total_bytes == 14 * GB + cache.total_bytes
    assert result.notes == ()


@pytest.mark.parametrize(
    ("bits", "num_bytes"), [(4.5, 3_937_500_000), (Fraction(9, 2), 3_937_500_000), (8, 7 * GB)]
)
def test_inference_at_any_bit_width(bits: calc.Number, num_bytes: int) -> None:
    """4.5 bits per weight (4-bit blocks with a 16-bit scale per 32) x 7 x 10^9 / 8."""
    assert calc.inference(num_parameters=7 * B, bits=bits).weights_bytes == num_bytes


def test_kv_cache_of_llama_3_8b() -> None:
    """2 x 32 x 8 x 128 x 2 bytes = 128 KiB per token; 8,192 tokens are 1 GiB; 4 sequences 4 GiB."""
    one = calc.kv_cache(layers=32, kv_heads=8, head_dim=128, tokens=8192, sequences=1, bits=16)
    assert one.per_token_bytes == 128 * 1024
    assert one.total_bytes == 2**30
    four = calc.kv_cache(layers=32, kv_heads=8, head_dim=128, tokens=8192, sequences=4, bits=16)
    assert four.total_bytes == 2**32
    eight_bits = calc.kv_cache(
        layers=32, kv_heads=8, head_dim=128, tokens=8192, sequences=4, bits=8
    )
    assert eight_bits.total_bytes == 2**31


WRONG = [
    (calc.training, {"num_parameters": 0, "bytes_per_parameter": 16}, "num_parameters"),
    (calc.training, {"num_parameters": -7 * B, "bytes_per_parameter": 16}, "num_parameters"),
    (calc.training, {"num_parameters": 10**18, "bytes_per_parameter": 16}, "num_parameters"),
    (calc.training, {"num_parameters": 10**5000, "bytes_per_parameter": 16}, "num_parameters"),
    (calc.training, {"num_parameters": 7.5, "bytes_per_parameter": 16}, "num_parameters"),
    (calc.training, {"num_parameters": 7, "bytes_per_parameter": 0}, "bytes_per_parameter"),
    (calc.training, {"num_parameters": 7, "bytes_per_parameter": 65}, "bytes_per_parameter"),
    (
        calc.training,
        {"num_parameters": 7, "bytes_per_parameter": float("nan")},
        "bytes_per_parameter",
    ),
    (
        calc.training,
        {"num_parameters": 7, "bytes_per_parameter": float("inf")},
        "bytes_per_parameter",
    ),
    (calc.training, {"num_parameters": 7}, "optimizer"),
    (
        calc.training,
        {"num_parameters": 7, "bytes_per_parameter": 16, "optimizer": "adam"},
        "optimizer",
    ),
    (
        calc.training,
        {"num_parameters": 7, "bytes_per_parameter": 16, "activation_bytes": -1},
        "activation_bytes",
    ),
    (
        calc.accumulation,
        {"micro_batch": 0, "steps": 8, "activation_per_sample_bytes": 1},
        "micro_batch",
    ),
    (calc.accumulation, {"micro_batch": 4, "steps": 0, "activation_per_sample_bytes": 1}, "steps"),
    (
        calc.accumulation,
        {"micro_batch": 4, "steps": 8, "replicas": 0, "activation_per_sample_bytes": 1},
        "replicas",
    ),
    (calc.lora, {"rank": 0, "layers": 32, "hidden": 4096}, "rank"),
    (calc.lora, {"rank": 5000, "layers": 32, "hidden": 4096}, "rank"),
    (calc.lora, {"rank": 8, "layers": 32, "hidden": 4096, "modules": ("q", "q_proj")}, "modules"),
    (calc.lora, {"rank": 8, "layers": 32, "hidden": 4096, "modules": ()}, "modules"),
    (calc.lora, {"rank": 8, "layers": 32, "hidden": 4096, "modules": ("x",)}, "modules"),
    (calc.lora, {"rank": 8, "layers": 32, "hidden": 4096, "modules": ("gate",)}, "intermediate"),
    (calc.qlora, {"num_parameters": 7 * B, "block": 0}, "block"),
    (calc.qlora, {"num_parameters": 7 * B, "double_block": 0}, "double_block"),
    (calc.inference, {"num_parameters": 7 * B, "bits": 0}, "bits"),
    (calc.inference, {"num_parameters": 7 * B, "bits": 128}, "bits"),
    (
        calc.kv_cache,
        {"layers": 32, "kv_heads": 8, "head_dim": 128, "tokens": 10**18},
        "tokens",
    ),
]


@pytest.mark.parametrize(("formula", "question", "place"), WRONG)
def test_a_question_without_an_answer_is_refused(
    formula: object, question: dict[str, object], place: str
) -> None:
    """Zero, negative, absurd, contradictory: an InputError that names the place, in a short line."""
    with pytest.raises(InputError) as caught:
        formula(**question)  # type: ignore[operator]
    assert f"`{place}`" in f"{caught.value.message} {caught.value.hint}"
    assert len(caught.value.message) < 200


def test_an_unknown_optimizer_lists_the_known_ones() -> None:
    """`adamw` holds what `adam` holds; a name without a rule is answered with the names that have one."""
    assert calc.optimizer_rule("adamw") is calc.optimizer_rule("adam")
    with pytest.raises(UnknownFact) as caught:
        calc.optimizer_rule("shampoo")
    assert caught.value.hint is not None
    assert "`adam-8bit`" in caught.value.hint


@given(
    st.integers(1, 10**13), st.sampled_from(sorted(calc.OPTIMIZER_RULES)), st.integers(0, 10**12)
)
def test_the_peak_is_the_sum_of_states_and_activations(
    num_parameters: int, optimizer: str, activation_bytes: int
) -> None:
    """No term is lost and none is counted twice, whatever the sizes."""
    result = calc.training(
        num_parameters=num_parameters, optimizer=optimizer, activation_bytes=activation_bytes
    )
    assert result.peak_bytes == result.states_bytes + result.activation_bytes
    assert 0 <= result.states_bytes - num_parameters * result.bytes_per_parameter < 1


def test_kv_cache_of_a_model_is_that_of_its_configuration() -> None:
    """Llama-3.1-8B: 32 layers, 8 KV heads of 128 (its config.json); 8,192 tokens in 16 bits are 1 GiB."""
    cache = calc.kv_cache_of_model(load_model("llama-3.1-8b"), tokens=8192)
    assert (cache.layers, cache.kv_heads, cache.head_dim, cache.latent_dim) == (32, 8, 128, None)
    assert cache.total_bytes == 2**30
    assert cache.notes == ()


def test_latent_attention_caches_one_short_vector_per_layer() -> None:
    """DeepSeek-V2, table 1: (d_c + d_h^R) l = 9/2 d_h l elements per token, with d_h = 128 and 27 layers."""
    cache = calc.kv_cache_of_model(load_model("deepseek-ai/DeepSeek-V2-Lite"), tokens=1, bits=8)
    assert cache.total_bytes == Fraction(9, 2) * 128 * 27
    assert (cache.kv_heads, cache.latent_dim) == (None, 576)


def test_windows_of_attention_are_said_and_not_used() -> None:
    """Mistral-7B-v0.1 looks back over 4,096 tokens: the textbook cache of 32,768 counts them all, and says so."""
    cache = calc.kv_cache_of_model(load_model("mistralai/Mistral-7B-v0.1"), tokens=32_768)
    assert cache.total_bytes == 32 * 2 * 8 * 128 * 2 * 32_768
    assert cache.notes == ("cache-windows-not-used",)


def test_lora_of_a_model_is_what_peft_prints() -> None:
    """`print_trainable_parameters()` of peft: Llama-2-7B r 8 on q, v 4,194,304; Llama-3-8B r 16 on all 41,943,040."""
    result = calc.lora_of_model(load_model("llama-2-7b"), rank=8)
    assert result.num_trainable == 4_194_304
    assert result.num_parameters == 6_738_415_616  # the published count
    result = calc.lora_of_model(load_model("llama-3.1-8b"), rank=16, modules=("all-linear",))
    assert result.num_trainable == 41_943_040


def test_lora_by_sizes_and_of_the_model_agree() -> None:
    """The formula and the listed matrices of Llama-3.1-8B give the same adapters, one by one."""
    sizes = calc.lora(rank=16, layers=32, hidden=4096, kv_hidden=1024, modules=("q", "k", "v", "o"))
    model = calc.lora_of_model(load_model("llama-3.1-8b"), rank=16, modules=("attention",))
    assert sizes.num_trainable == model.num_trainable
    assert [a.num_parameters for a in sizes.adapters] == [a.num_parameters for a in model.adapters]
    assert {adapter.times for adapter in model.adapters} == {32}


@pytest.mark.parametrize("modules", [("q", "nonsense"), ("nonsense",), ("",)])
def test_lora_on_what_a_model_does_not_have_is_refused(modules: tuple[str, ...]) -> None:
    """Nothing is dropped silently: a name that matches nothing is an error, also beside one that does."""
    with pytest.raises(InputError):
        calc.lora_of_model(load_model("llama-3.1-8b"), rank=8, modules=modules)
