"""What a run is fed: samples of the lengths that were asked for, in real collators."""

from __future__ import annotations

import pytest
import transformers

from tests.recipes import make_recipe
from wazn.errors import InputError
from wazn.trace.batches import PAD, TOKEN, WORD, Samples, collator_of, cut, lengths, tokenizer
from wazn.trace.script import Script, Task

RECIPE = make_recipe(micro_batch=3, seq_len=8, grad_accum=2)


def test_words_are_tokens() -> None:
    """The tokenizer is one of transformers' own: n words are n tokens, and an end more is one more."""
    made = tokenizer()
    assert isinstance(made, transformers.PreTrainedTokenizerFast)
    assert made(" ".join([WORD] * 3))["input_ids"] == [TOKEN] * 3
    assert len(made(f"{WORD} {WORD}{made.eos_token}")["input_ids"]) == 3
    assert made.pad_token_id == PAD


@pytest.mark.parametrize(
    ("padding", "expected"), [(0.0, [8, 8, 8]), (0.25, [8, 6, 6]), (0.3, [8, 5, 5])]
)
def test_all_samples_but_the_first_are_shorter(padding: float, expected: list[int]) -> None:
    """A quarter less than 8 is 6; what does not come out even is rounded down."""
    assert lengths(RECIPE, Script(padding=padding)) == expected


def test_something_must_be_left() -> None:
    """Padding is less than the whole sample."""
    with pytest.raises(InputError, match="leaves nothing"):
        lengths(RECIPE, Script(padding=1.0))


def test_there_are_as_many_samples_as_steps_need() -> None:
    """3 samples in each of 2 micro-batches in each of 2 steps, every micro-batch like the others."""
    samples = Samples(RECIPE, Script(padding=0.5), Task.CAUSAL_LM)
    assert len(samples) == 12
    assert [len(sample["input_ids"]) for sample in samples] == [8, 4, 4] * 4


def test_padding_is_masked_and_not_trained() -> None:
    """`DataCollatorForSeq2Seq` fills ids with the padding token, the mask with 0 and labels with -100."""
    script = Script(padding=0.5)
    samples = list(Samples(make_recipe(micro_batch=2, seq_len=4), script, Task.CAUSAL_LM))[:2]
    collate = collator_of(None, Task.CAUSAL_LM, script)
    assert collate is not None
    batch = collate(samples)
    assert batch["input_ids"].tolist() == [[TOKEN] * 4, [TOKEN] * 2 + [PAD] * 2]
    assert batch["attention_mask"].tolist() == [[1] * 4, [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[TOKEN] * 4, [TOKEN] * 2 + [-100] * 2]


def test_packing_begins_positions_anew() -> None:
    """A sample of 4 tokens in 2 sequences is one row: positions 0, 1, 0, 1, and no label for a first token.

    Source: `DataCollatorWithFlattening` in transformers/data/data_collator.py.
    """
    script = Script(packing=2)
    samples = list(Samples(make_recipe(micro_batch=1, seq_len=4), script, Task.CAUSAL_LM))[:1]
    collate = collator_of(None, Task.CAUSAL_LM, script)
    assert collate is not None
    batch = collate(samples)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, TOKEN, -100, TOKEN]]
    assert "attention_mask" not in batch


def test_classification_is_not_packed() -> None:
    """A row of several texts would have one label."""
    with pytest.raises(InputError, match="not packed"):
        collator_of(None, Task.SEQUENCE_CLASSIFICATION, Script(packing=2))


def test_nothing_is_lost_in_cutting() -> None:
    """7 tokens in 3 pieces are 2, 2 and 3 of them, in order."""
    pieces = cut({"input_ids": list(range(7))}, 3)
    assert [piece["input_ids"] for piece in pieces] == [[0, 1], [2, 3], [4, 5, 6]]
