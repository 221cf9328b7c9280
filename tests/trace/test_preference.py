"""TRL's trainers run unmodified: what each of them holds, by pencil and by its own source."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recipes import BF16, lora_recipe, make_recipe, qlora_recipe
from tests.sampling import is_due
from tests.trace.test_step import TINY
from tests.trace.test_trainer import MIXED, PHASES, named
from wazn.dtypes import BFLOAT16
from wazn.errors import InputError, Unsupported
from wazn.recipe import Attention, Checkpointing, KbitPreparation, Recipe
from wazn.timeline.events import Category, Phase
from wazn.trace.rehearsal import LOSS, Rehearsal
from wazn.trace.script import Loop, Reference, Script, Task, needs_reference
from wazn.trace.step import rehearse

SFT, DPO, REWARD = (Script(loop=loop) for loop in (Loop.SFT, Loop.DPO, Loop.REWARD))
GRPO = Script(loop=Loop.GRPO, num_generations=2)
LOWERED = replace(BF16, autocast_dtype=BFLOAT16)
PLAIN_QLORA = qlora_recipe(precision=LOWERED, checkpointing=Checkpointing.FULL)
assert PLAIN_QLORA.quantization is not None
TRL_QLORA = replace(
    PLAIN_QLORA,
    quantization=replace(PLAIN_QLORA.quantization, kbit_preparation=KbitPreparation.NONE),
)
RECIPES: dict[str, Recipe] = {
    "full": make_recipe(),
    "mixed, checkpointing": make_recipe(precision=MIXED, checkpointing=Checkpointing.FULL),
    "autocast, checkpointing": make_recipe(precision=LOWERED, checkpointing=Checkpointing.FULL),
    "accumulation": make_recipe(grad_accum=2),
    "lora": lora_recipe(),
    "lora, reentrant": lora_recipe(precision=LOWERED, checkpointing=Checkpointing.FULL_REENTRANT),
    "qlora": TRL_QLORA,
}
CASES = {
    f"{script.loop}: {name}": (recipe, script)
    for script in (SFT, DPO, REWARD, GRPO)
    for name, recipe in RECIPES.items()
}
# Two that once stopped: a recomputation under autocast, and positions under a mask.
ALWAYS = ("sft: mixed, checkpointing", "dpo: autocast, checkpointing", "grpo: qlora")
CHUNK_COLUMNS = (
    32_768  # `_CHUNKED_LOGPROB_CHUNK_SIZE` in trl/trainer/utils.py, whatever the vocabulary
)


def shapes(rehearsal: Rehearsal, category: Category, *, step: int = 1) -> set[tuple[int, ...]]:
    """Return the shapes of what a step allocates of a category."""
    return {
        event.shape
        for event in rehearsal.events
        if event.num_bytes > 0
        and event.step == step
        and rehearsal.names.get(event.block_id, ("", ""))[0] == category
    }


def of_loss(rehearsal: Rehearsal, phase: Phase) -> list[tuple[int, ...]]:
    """Return the shapes of what the loss allocates in a phase of the first step."""
    return [
        event.shape
        for event in rehearsal.events
        if event.num_bytes > 0
        and (event.step, event.phase) == (1, phase)
        and (event.phase == Phase.BACKWARD or event.place.module == LOSS)
    ]


@pytest.mark.parametrize("case", CASES)
def test_every_trainer_takes_two_steps_of_every_recipe(case: str) -> None:
    """Loading, then two steps of six phases each."""
    if case not in ALWAYS and not is_due(f"trl: {case}", turns=6):
        pytest.skip("not today's turn")
    recipe, script = CASES[case]
    peaks = rehearse(TINY, recipe, script).peaks()
    steps = [(step, phase) for step in (1, 2) for phase in PHASES]
    assert list(peaks) == [(0, Phase.LOAD), *steps]


@pytest.fixture(scope="module")
def dpo() -> Rehearsal:
    """Full fine-tuning in DPO, 2 pairs, prompts of 256 tokens and completions of 256."""
    return rehearse(TINY, make_recipe(), DPO)


def test_without_adapters_dpo_holds_a_second_model(dpo: Rehearsal) -> None:
    """Its weights are there twice, and with precomputed log-probabilities once."""
    precomputed = rehearse(TINY, make_recipe(), replace(DPO, reference=Reference.PRECOMPUTED))
    assert named(dpo, Category.WEIGHTS) == 2 * named(precomputed, Category.WEIGHTS)


def test_with_adapters_the_reference_is_the_base_without_them() -> None:
    """A second model is one more base beside a run with adapters: 3,386,880 bytes of 1,692,928 parameters in bf16 and
    two tables of 32 rotary frequencies.
    """
    recipe = lora_recipe(checkpointing=Checkpointing.FULL)
    own = rehearse(TINY, recipe, DPO)
    second = rehearse(TINY, recipe, replace(DPO, reference=Reference.MODEL))
    more = named(second, Category.WEIGHTS) - named(own, Category.WEIGHTS)
    assert more == 2 * 1_692_928 + 2 * 512
    assert second.peaks()[1, Phase.CLIP] - own.peaks()[1, Phase.CLIP] == more


def test_dpo_reads_chosen_and_rejected_in_one_batch(dpo: Rehearsal) -> None:
    """2 pairs are 4 rows of 512 tokens: `DataCollatorForPreference` in trl/trainer/dpo_trainer.py joins them."""
    assert shapes(dpo, Category.INPUTS) == {(4, 512)}


def test_only_completions_are_put_through_the_head(dpo: Rehearsal) -> None:
    """4 completions of 256 tokens are 1,024 rows of the tile in which the head's product is made, 32,768 columns wide
    though the vocabulary has 1,000: once for the model and once for the reference. Backward makes it once more, and
    the gradients of 1,024 rows and of the head in fp32.

    Source: `ChunkedLogProbFunction` in trl/kernels/chunked_logprob.py.
    """
    assert of_loss(dpo, Phase.LOSS).count((1024, CHUNK_COLUMNS)) == 2
    in_backward = [
        (event.shape, event.dtype)
        for event in dpo.events
        if event.num_bytes > 0 and (event.step, event.phase) == (1, Phase.BACKWARD)
    ]
    assert in_backward.count(((1024, CHUNK_COLUMNS), "bfloat16")) == 1
    assert ((1024, 256), "float32") in in_backward
    assert ((1000, 256), "float32") in in_backward


def test_padding_is_not_put_through_the_head() -> None:
    """Of rows of 512 and 256 tokens all but the first of each are predicted: 511 + 255 rows of the tile."""
    rehearsal = rehearse(TINY, make_recipe(), replace(SFT, padding=0.5))
    assert of_loss(rehearsal, Phase.LOSS).count((766, CHUNK_COLUMNS)) == 1


def test_packing_needs_no_mask() -> None:
    """2 samples of 4 sequences are one row of 1,024 tokens with their positions, 8 sequences to flash-attn.

    Source: `pack_dataset` and `DataCollatorForLanguageModeling(padding_free=True)` in trl.
    """
    recipe = make_recipe(attention=Attention.FLASH)
    rehearsal = rehearse(TINY, recipe, replace(SFT, packing=4))
    made = [event.shape for event in rehearsal.events if event.step == 1 and event.num_bytes > 0]
    assert (1, 1024) in shapes(rehearsal, Category.INPUTS)
    assert (9,) in made
    assert not any(shape[-2:] == (1024, 1024) for shape in made)


def test_trl_trains_adapters_of_a_quantised_base_in_bf16() -> None:
    """2 bytes a parameter instead of peft's 4: "the PEFT adapter weights are converted to bf16" in sft_trainer.py."""
    rehearsal = rehearse(TINY, TRL_QLORA, SFT)
    trained = rehearsal.num_trainable_parameters
    assert named(rehearsal, Category.GRADIENTS) == 2 * trained
    alive: dict[int, int] = {}
    for event in rehearsal.events:
        if rehearsal.names.get(event.block_id, ("", ""))[0] == Category.ADAPTER_WEIGHTS:
            alive[event.block_id] = alive.get(event.block_id, 0) + event.num_bytes
    assert sum(alive.values()) == 2 * trained


def test_a_reward_model_scores_pairs() -> None:
    """2 pairs are 4 rows; its head has one output: 256 weights instead of a vocabulary."""
    rehearsal = rehearse(TINY, make_recipe(), REWARD)
    assert shapes(rehearsal, Category.INPUTS) == {(4, 512)}
    assert rehearsal.num_parameters == 1_692_928 - 1000 * 256 + 256


def test_grpo_trains_on_prompts_and_completions() -> None:
    """2 completions of 384 tokens after prompts of 128: the tile of the head has 768 rows, the prompts are left out."""
    script = replace(GRPO, prompt_len=128)
    rehearsal = rehearse(TINY, make_recipe(), script)
    assert of_loss(rehearsal, Phase.LOSS).count((768, CHUNK_COLUMNS)) == 1


def test_grpo_with_a_reference_holds_a_second_model() -> None:
    """Without adapters a penalty (`beta`) needs one; without a penalty there is none."""
    recipe = make_recipe(checkpointing=Checkpointing.FULL)
    without = rehearse(TINY, recipe, GRPO)
    beside = rehearse(TINY, recipe, replace(GRPO, reference=Reference.MODEL))
    assert named(beside, Category.WEIGHTS) == 2 * named(without, Category.WEIGHTS)


@pytest.mark.parametrize(
    ("recipe", "script", "wanted"),
    [
        (make_recipe(), DPO, True),
        (lora_recipe(), DPO, False),
        (lora_recipe(), replace(DPO, reference=Reference.MODEL), True),
        (make_recipe(), replace(DPO, reference=Reference.PRECOMPUTED), False),
        (make_recipe(), GRPO, False),
        (make_recipe(), replace(GRPO, reference=Reference.MODEL), True),
        (lora_recipe(), replace(GRPO, reference=Reference.MODEL), False),
        (make_recipe(), SFT, False),
    ],
)
def test_who_needs_a_second_model(recipe: Recipe, script: Script, wanted: bool) -> None:
    """As the trainers decide it: the base without its adapters is a reference, if there are adapters."""
    assert needs_reference(recipe, script) is wanted


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (replace(GRPO, reference=Reference.PRECOMPUTED), "no precomputed reference"),
        (replace(DPO, prompt_len=511), "must leave two tokens"),
        (replace(GRPO, num_generations=3), "GRPOConfig"),
    ],
    ids=["precomputed in GRPO", "no room for a completion", "groups that do not come out even"],
)
def test_what_a_trainer_refuses(script: Script, words: str) -> None:
    """The question is wrong, and the answer names what is."""
    with pytest.raises(InputError, match=words):
        rehearse(TINY, make_recipe(), script)


def test_classifiers_are_left_to_trainer() -> None:
    """SFT trains language models; the answer says which loop takes the rest."""
    with pytest.raises(Unsupported, match="language models and text") as refused:
        rehearse(TINY, make_recipe(), replace(SFT, task=Task.SEQUENCE_CLASSIFICATION))
    assert "--loop trainer" in str(refused.value.hint)


def test_only_sft_packs() -> None:
    """A pair or a prompt is a row of its own."""
    with pytest.raises(InputError, match="packs nothing"):
        rehearse(TINY, make_recipe(), replace(DPO, packing=2))


def test_offloaded_checkpoints_take_no_room_on_the_card() -> None:
    """Four layers more keep four hidden states of 2 x 512 x 256 x 2 bytes more until the loss; offloaded, nothing but
    their weights: TRL holds the last five tensors that it sent away (`max_fwd_stash_size`), however many there are.
    """
    recipe = make_recipe(checkpointing=Checkpointing.FULL)

    def more_at_the_loss(script: Script) -> int:
        eight, twelve = (
            rehearse({**TINY, "num_hidden_layers": count}, recipe, script) for count in (8, 12)
        )
        weights = named(twelve, Category.WEIGHTS) - named(eight, Category.WEIGHTS)
        return twelve.peaks()[1, Phase.LOSS] - eight.peaks()[1, Phase.LOSS] - weights

    assert more_at_the_loss(SFT) == 4 * 2 * 512 * 256 * 2
    assert more_at_the_loss(replace(SFT, activation_offloading=True)) == 0


def test_a_run_leaves_libraries_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    """What TRL and PyTorch are told inside is taken back, and nothing is printed."""
    import torch
    from trl.kernels import chunked_logprob
    from trl.models import activation_offloading
    from trl.trainer import utils

    watched = (
        chunked_logprob,
        utils,
        activation_offloading.OffloadActivations,
        torch.UntypedStorage,
    )
    before = [dict(vars(owner)) for owner in watched]
    rehearse(TINY, make_recipe(), replace(SFT, activation_offloading=True))
    assert [dict(vars(owner)) for owner in watched] == before
    assert capsys.readouterr().out == ""
