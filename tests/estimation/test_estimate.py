"""The estimate as a whole: what stays, what it needs, whether it fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

import wazn
from wazn.cluster import Gpu
from wazn.errors import InputError, UnknownFact, Unsupported
from wazn.estimation.answer import OutsideLine, Verdict
from wazn.estimation.assemble import fit_of
from wazn.estimation.estimate import MICRO_BATCHES_RUN
from wazn.estimation.options import Options, resolve
from wazn.facts.models import list_models, load_model
from wazn.facts.stacks import resolve_stack
from wazn.model.config import supported_families
from wazn.model.lora import adapted, count_lora_parameters
from wazn.simulate.step import simulate
from wazn.timeline.events import Category, Part, Phase, Segment, Tag, Timeline
from wazn.timeline.replay import replay
from wazn.trace.script import Script
from wazn.units import GIB, MIB

LLAMA_3_1_8B = 8_030_261_248  # parameters, as published
ROTARY_BUFFERS = 2 * 64 * 4  # `inv_freq` and `original_inv_freq`, fp32, for heads of 128
# rank x (in + out), 32 layers: q, o 4096 + 4096, k, v 4096 + 1024, gate, up, down 4096 + 14336
LORA_OF_RANK_ONE = 32 * (2 * 8192 + 2 * 5120 + 3 * 18432)


def test_what_stays_of_full_fine_tuning() -> None:
    """bf16 weights and gradients, two states of the weights' type: 2 + 2 + 2 + 2 bytes per parameter."""
    answer = wazn.estimate("llama-3.1-8b", method="full", optimizer="adamw")
    assert answer.model.num_parameters == LLAMA_3_1_8B
    assert answer.model.num_trainable_parameters == LLAMA_3_1_8B
    assert answer.resident.weights_bytes == 2 * LLAMA_3_1_8B + ROTARY_BUFFERS
    assert answer.resident.gradients_bytes == 2 * LLAMA_3_1_8B
    assert answer.resident.optimizer_bytes == pytest.approx(4 * LLAMA_3_1_8B, rel=1e-6)
    assert answer.resident.adapter_bytes == 0
    assert answer.resident.quantization_state_bytes == 0


def test_what_stays_of_lora() -> None:
    """fp32 adapters of rank 16: 4 bytes of adapter and of gradient and 8 of states per trained parameter."""
    answer = wazn.estimate("llama-3.1-8b", optimizer="adamw")
    trained = 16 * LORA_OF_RANK_ONE
    assert answer.model.num_trainable_parameters == trained == 41_943_040
    assert answer.resident.weights_bytes == 2 * LLAMA_3_1_8B + ROTARY_BUFFERS
    assert answer.resident.adapter_bytes == 4 * trained
    assert answer.resident.gradients_bytes == 4 * trained
    assert answer.resident.optimizer_bytes == pytest.approx(8 * trained, rel=1e-4)


def test_a_public_measurement() -> None:
    """All of Mistral-7B-v0.1, 4 x 4096 tokens on an A100: 72,434,837,504 bytes measured, in the optimizer step."""
    answer = wazn.estimate(
        "mistral-7b-v0.1",
        method="full",
        precision="bf16",
        optimizer="adamw",
        micro_batch=4,
        seq_len=4096,
        checkpointing="full",
        attention="flash",
        stack="hf@4.48",
        gpu="a100-80gb",
    )
    assert answer.peak.allocated_bytes == pytest.approx(72_434_837_504, rel=0.002)
    assert answer.peak.phase == "optimizer-step"
    assert answer.fit.verdict is Verdict.FITS


def test_more_micro_batches_change_nothing() -> None:
    """Playing 7 micro-batches of a step gives what playing the first few gives: allocated and reserved, to the byte."""
    spec = load_model("smollm2-135m")
    habits = resolve_stack("hf", family=spec.family)
    recipe = resolve(Options(method="full", micro_batch=2, seq_len=512), habits).recipe
    few, many = (
        replay(simulate(spec, replace(recipe, grad_accum=times), habits, num_fetched=7).timeline)
        for times in (MICRO_BATCHES_RUN, 7)
    )
    assert few.peak_allocated_bytes == many.peak_allocated_bytes
    assert few.peak_reserved_bytes == many.peak_reserved_bytes
    assert few.by_category() == many.by_category()


# --- the verdict, on timelines made by hand -------------------------------------------------------


def card(usable_bytes: int) -> Gpu:
    """A card of which only the memory matters."""
    return Gpu(
        id="card",
        name="Card",
        vendor="nvidia",
        arch="ampere",
        compute_capability="8.0",
        memory_gb=1,
        usable_bytes=usable_bytes,
        usable_basis="measured",
        supports_bf16=True,
        supports_fp8=False,
    )


def timeline(*sizes: int) -> Timeline:
    """A positive size is allocated; a negative one frees the oldest block of that size."""
    tag = Tag(Category.WEIGHTS, "w")
    ids: dict[int, list[int]] = {}
    columns: list[int] = []
    for number, size in enumerate(sizes):
        if size > 0:
            ids.setdefault(size, []).append(number)
        columns.append(number if size > 0 else ids[-size].pop(0))
    segment = Segment(
        phase=Phase.FORWARD,
        step=1,
        layer=None,
        block_ids=columns,
        sizes=list(sizes),
        tags=[tag] * len(sizes),
    )
    return Timeline(parts=(Part(segments=(segment,)),))


def outside(category: str, num_bytes: int) -> tuple[OutsideLine, ...]:
    """One line outside the allocator."""
    return (OutsideLine(category=category, num_bytes=num_bytes, basis="assumed", source="a test"),)


@pytest.mark.parametrize(
    ("usable_mib", "verdict", "headroom_mib"),
    [
        (1200, Verdict.FITS, 100),  # 8.3 % left
        (1146, Verdict.FITS, 46),  # 4.01 %
        (1145, Verdict.TIGHT, 45),  # 3.93 %
        (1100, Verdict.TIGHT, 0),
        (1099, Verdict.DOES_NOT_FIT, -1),
    ],
)
def test_the_verdict(usable_mib: int, verdict: Verdict, headroom_mib: int) -> None:
    """1000 MiB of tensors and 100 MiB outside: tight below 4 % of the usable memory, and no byte over it."""
    _, fit = fit_of(card(usable_mib * MIB), timeline(1000 * MIB), outside("context", 100 * MIB))
    assert fit.verdict is verdict
    assert fit.headroom_bytes == headroom_mib * MIB


def test_what_fits_after_the_cache_is_released_is_tight() -> None:
    """600 MiB freed and 900 MiB wanted need 1500 MiB with a cache and 900 without: PyTorch gives back and goes on."""
    events = timeline(600 * MIB, -600 * MIB, 900 * MIB)
    assert replay(events).peak_reserved_bytes == 1500 * MIB
    need, fit = fit_of(card(1000 * MIB), events, ())
    assert fit.verdict is Verdict.TIGHT
    assert fit.retries == 1
    assert need.peak_reserved_bytes == 900 * MIB
    assert fit.headroom_bytes == 100 * MIB


def test_where_it_stops() -> None:
    """The second GiB is asked for with 500 MiB left; the need is told as if there were room."""
    need, fit = fit_of(card(GIB + 500 * MIB), timeline(GIB, GIB), ())
    assert fit.verdict is Verdict.DOES_NOT_FIT
    assert need.peak_reserved_bytes == 2 * GIB
    assert fit.headroom_bytes == -524 * MIB
    assert fit.out_of_memory is not None
    assert fit.out_of_memory.tried_bytes == GIB
    assert fit.out_of_memory.free_bytes == 500 * MIB


def test_managed_memory_gives_way() -> None:
    """Paged states are moved to the host when tensors want the room: tight, and the headroom says how much moves."""
    _, fit = fit_of(card(1200 * MIB), timeline(1000 * MIB), outside("managed-memory", 500 * MIB))
    assert fit.verdict is Verdict.TIGHT
    assert fit.headroom_bytes == -300 * MIB


# --- the door of the library ----------------------------------------------------------------------


def test_a_name_may_be_a_list() -> None:
    """Where the command line takes names with commas, Python takes a list."""
    listed = wazn.estimate("smollm2-135m", targets=["q_proj", "v_proj"])
    assert listed.recipe == wazn.estimate("smollm2-135m", targets="q_proj,v_proj").recipe


def test_errors_of_the_library() -> None:
    """What cannot be answered raises one of the front door's errors, and each says what to do."""
    with pytest.raises(InputError, match="unknown option `seqlen`\nhint: did you mean `seq_len`"):
        wazn.estimate("smollm2-135m", seqlen=5)
    with pytest.raises(InputError, match="`model`"):
        wazn.estimate(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`gpu`"):
        wazn.estimate("smollm2-135m", gpu=24)  # type: ignore[arg-type]
    with pytest.raises(UnknownFact) as unknown:
        wazn.estimate("smollm2-135m", gpu="rtx-4099")
    assert "rtx-4090-24gb" in unknown.value.nearest
    with pytest.raises(InputError, match="needs `engine` `trace`"):
        wazn.estimate("smollm2-135m", script=Script())


@pytest.mark.parametrize("family", supported_families())
def test_every_family_that_is_read_has_habits(family: str) -> None:
    """What the newest stack does with a model is known for each family whose configurations are read."""
    assert resolve_stack("hf", family=family).family == family


def test_notes_on_what_a_card_cannot_do() -> None:
    """A T4 has neither bfloat16 nor flash attention; what AMD's driver holds is not known."""

    def notes(**question: object) -> dict[str, dict[str, object]]:
        answer = wazn.estimate("smollm2-135m", **question)  # type: ignore[arg-type]
        return {note.code: dict(note.params) for note in answer.notes}

    assert notes(gpu="t4")["bf16-not-in-hardware"]["instead"] == "fp16"
    assert notes(gpu="t4")["flash-not-on-this-gpu"]["instead"] == "math"
    half = notes(gpu="t4", precision="fp16-mixed")
    assert half["flash-not-on-this-gpu"]["instead"] == "math"  # 9 query heads share 3 of keys
    assert "flash-package-refuses" in notes(gpu="t4", attention="flash")
    assert notes(gpu="t4", attention="eager", precision="fp32") == {}
    assert "outside-unknown" in notes(gpu="mi300x")


def test_a_class_that_knows_eager_attention_only() -> None:
    """GPT-OSS has sinks, which scaled_dot_product_attention does not know; Llama falls back to nothing."""
    for model, falls_back in (("gpt-oss-20b", True), ("smollm2-135m", False)):
        codes = [note.code for note in wazn.estimate(model, seq_len=64).notes]
        assert ("attention-falls-back" in codes) is falls_back


def test_notes_on_the_recipe() -> None:
    """Beyond the positions, accumulation, a target that matches nothing: each is said."""
    answer = wazn.estimate(
        "smollm2-135m", seq_len=10_000, grad_accum=2, targets="q_proj,nope", optimizer="paged-adamw"
    )
    codes = {note.code for note in answer.notes}
    assert {"beyond-positions", "accumulation-keeps-gradients", "target-unmatched"} <= codes


def test_what_k_bit_preparation_costs() -> None:
    """Llama-3.1-8B: embeddings and head of 128,256 x 4096 and 65 norms of 4096 take 2 more bytes for each parameter."""
    turned, norms, left = (
        wazn.estimate("llama-3.1-8b", method="qlora", kbit_preparation=helper).resident
        for helper in ("peft", "trl", "none")
    )
    not_quantised = 2 * 128_256 * 4096 + 65 * 4096
    quantised = (LLAMA_3_1_8B - not_quantised) // 2
    assert left.weights_bytes == quantised + 2 * not_quantised + ROTARY_BUFFERS
    assert turned.weights_bytes == left.weights_bytes + 2 * not_quantised
    assert norms.weights_bytes == left.weights_bytes + 2 * 65 * 4096


FAMILIES = {model.family: model.id for model in reversed(list_models())}


@pytest.mark.parametrize("family", sorted(set(supported_families()) & set(FAMILIES)))
@pytest.mark.parametrize("targets", ["attention", "all-linear"])
def test_what_is_trained_on_the_tape_is_what_peft_makes(family: str, targets: str) -> None:
    """The adapters that a run holds are those that are counted (and compared with peft) elsewhere, 4 bytes each."""
    try:
        answer = wazn.estimate(
            FAMILIES[family], targets=targets, rank=8, seq_len=64, engine="simulate"
        )
    except Unsupported as refusal:
        pytest.skip(refusal.message)
    expected = count_lora_parameters(adapted(answer.spec, targets), rank=8)
    assert answer.model.num_trainable_parameters == expected
    assert answer.resident.adapter_bytes == 4 * expected
    assert answer.resident.gradients_bytes == 4 * expected


def test_modules_that_are_trained_whole() -> None:
    """A copy of the embedding is trained beside the adapters of Llama-3.1-8B, in the type of the original."""
    answer = wazn.estimate("llama-3.1-8b", modules_to_save="embed_tokens")
    assert answer.model.num_trainable_parameters == 41_943_040 + 128_256 * 4096
    assert answer.resident.adapter_bytes == 4 * 41_943_040 + 2 * 128_256 * 4096


def test_the_flash_package_takes_no_fp32() -> None:
    """flash-attn stops with "only support fp16 and bf16 data type": under autocast the queries are half, else not."""
    with pytest.raises(InputError, match="takes fp16 and bf16 only") as caught:
        wazn.estimate("qwen2.5-0.5b", attention="flash", precision="fp32")
    assert "--attention sdpa" in str(caught.value.hint)
    wazn.estimate("qwen2.5-0.5b", attention="flash", precision="bf16-mixed")


def test_an_answer_can_be_printed() -> None:
    """`print(answer)` shows the figures, and neither the model's layers nor every allocation."""
    text = repr(wazn.estimate("smollm2-135m", gpu="rtx-4090"))
    assert "allocated_bytes=" in text
    assert len(text) < 10_000
