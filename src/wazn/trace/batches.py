"""What a run is fed: samples of token lists, and the collator that joins them, as a user's script has them.

Shape legend: B samples in a micro-batch, S tokens in a sample. S is `Recipe.seq_len`; what is shorter is padded to
the longest of its micro-batch, what is packed is laid end to end.

A tokenizer is needed to pad; no file of one can be loaded here, so it is a real one of a few words, made in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from wazn.errors import InputError, Unsupported
from wazn.recipe import Recipe
from wazn.trace.images import image_batch, sees_images
from wazn.trace.script import Script, Task

__all__ = [
    "EOS",
    "PAD",
    "TOKEN",
    "WORD",
    "Samples",
    "collator_of",
    "cut",
    "lengths",
    "task_of_model",
    "tokenizer",
]

PAD = 1
TOKEN = 4  # of the only word there is
WORD = "word"
EOS = "<eos>"
_WORDS = ("<unk>", "<pad>", EOS, "<bos>", WORD)

Sample = dict[str, Any]


@cache
def tokenizer() -> Any:
    """Return a real tokenizer that knows one word: `n` words are `n` tokens.

    Source: `PreTrainedTokenizerFast` over `tokenizers`' word-level model, split at white space.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({word: index for index, word in enumerate(_WORDS)}, "<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token=EOS,
        bos_token="<bos>",
        model_max_length=1 << 40,
    )


def task_of_model(model: Any) -> Task:
    """Return the task that a model's head is for."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if type(base).__name__.endswith("ForSequenceClassification"):
        return Task.SEQUENCE_CLASSIFICATION
    if base.config.is_encoder_decoder:
        return Task.SEQ2SEQ
    return Task.IMAGE_TEXT if sees_images(base) else Task.CAUSAL_LM


def last_token(model: Any) -> int:
    """Return the token that a sample ends with: any, but for classifiers such as BART's, which look for the end."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if task_of_model(base) is Task.SEQUENCE_CLASSIFICATION and base.config.is_encoder_decoder:
        return int(base.config.eos_token_id)
    return TOKEN


def lengths(recipe: Recipe, script: Script) -> list[int]:
    """Return the tokens of each sample of a micro-batch, before padding: the first is full, the others are shorter by
    `Script.padding`.

    Raises: InputError if less than one token is left.
    """
    shorter = int(recipe.seq_len * (1 - script.padding))
    if shorter < 1:
        raise InputError("`--padding` leaves nothing of a sample", hint="give less than 1.0")
    return [recipe.seq_len, *[shorter] * (recipe.micro_batch - 1)]


class Samples(torch.utils.data.Dataset[Sample]):
    """As many samples as the run needs, each micro-batch like the others."""

    def __init__(self, recipe: Recipe, script: Script, task: Task, *, last: int = TOKEN) -> None:
        self._samples = [_sample(task, length, script, last) for length in lengths(recipe, script)]
        self._length = recipe.micro_batch * recipe.grad_accum * script.num_steps

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def __getitem__(self, index: int) -> Sample:
        """Return one sample, as lists."""
        return dict(self._samples[index % len(self._samples)])

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples in order."""
        return (self[index] for index in range(self._length))


def _sample(task: Task, length: int, script: Script, last: int) -> Sample:
    tokens = [TOKEN] * (length - 1) + [last]
    sample: Sample = {"input_ids": tokens, "attention_mask": [1] * length}
    if task is Task.SEQUENCE_CLASSIFICATION:
        return {**sample, "label": 0}
    if task is Task.SEQ2SEQ:
        return {**sample, "labels": [TOKEN] * (script.target_len or length)}
    return {**sample, "labels": tokens}


def collator_of(model: Any, task: Task, script: Script) -> Callable[[list[Sample]], Sample] | None:
    """Return the collator of `transformers` that a script takes for such samples; None is Trainer's default.

    Raises: Unsupported where the installed version has none; InputError for packed classification.
    """
    import transformers

    if task is Task.IMAGE_TEXT:
        if script.packing is not None or script.padding:
            raise Unsupported("samples with images are neither packed nor padded in a rehearsal")
        return _WithImages(model, script)
    if script.packing is not None:
        if task is Task.SEQUENCE_CLASSIFICATION:  # a label belongs to a whole row
            raise InputError(
                "classification is not packed: a row has one label", hint="leave `--packing` out"
            )
        if not hasattr(transformers, "DataCollatorWithFlattening"):  # since 4.44
            raise Unsupported(
                "packing needs `DataCollatorWithFlattening`, which this transformers does not have",
                hint="`pip install 'transformers>=4.44'`",
            )
        return _Packed(transformers.DataCollatorWithFlattening(), script.packing)
    if not script.padding:
        return None
    if task is Task.SEQUENCE_CLASSIFICATION:
        return transformers.DataCollatorWithPadding(tokenizer())
    return transformers.DataCollatorForSeq2Seq(
        tokenizer(), model=model if task is Task.SEQ2SEQ else None
    )


class _WithImages:
    """Makes what a processor and a script's own collator make of samples that begin with images."""

    def __init__(self, model: Any, script: Script) -> None:
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._script = script

    def __call__(self, samples: list[Sample]) -> Sample:
        """Return a micro-batch as long and as large as the samples."""
        return image_batch(
            self._model,
            micro_batch=len(samples),
            seq_len=len(samples[0]["input_ids"]),
            num_images=self._script.num_images,
            image_size=self._script.image_size,
        )


class _Packed:
    """Cuts each sample into so many sequences before the collator lays them end to end."""

    def __init__(self, collate: Callable[[list[Sample]], Sample], num_sequences: int) -> None:
        self._collate = collate
        self._num_sequences = num_sequences

    def __call__(self, samples: list[Sample]) -> Sample:
        """Return one row of B * S tokens, with positions that begin anew at every sequence."""
        sequences = [piece for sample in samples for piece in cut(sample, self._num_sequences)]
        return self._collate(sequences)


def cut(sample: Sample, num_sequences: int) -> list[Sample]:
    """Cut a sample's lists into so many pieces, as even as it goes.

    >>> cut({"labels": [1, 2, 3]}, 2)
    [{'labels': [1]}, {'labels': [2, 3]}]
    """
    pieces = []
    for index in range(num_sequences):
        piece = {}
        for name, column in sample.items():
            edges = (
                len(column) * index // num_sequences,
                len(column) * (index + 1) // num_sequences,
            )
            piece[name] = column[slice(*edges)]
        pieces.append(piece)
    return pieces
