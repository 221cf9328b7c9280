"""The words of the notes: one sentence or two per code, filled with the note's parameters."""

from __future__ import annotations

from wazn.facts.notes import Note
from wazn.model.fields import printable
from wazn.units import format_size

__all__ = ["NOTES", "note_text"]

_LONGEST_VALUE = 2000
NOTES = {
    # look-ups
    "config-defaults": (
        "{model} does not name all sizes; those of the class of `{family}` were taken, as transformers does: {keys}."
    ),
    "gpu-is-a-size": (
        "`{asked}` is a size, not a card: one of {memory_gb} GB that keeps for itself what {reference} does is assumed."
    ),
    "gpu-name-ambiguous": "`{asked}` can mean several cards; {taken} was taken, not {others}.",
    "gpu-usable-memory-assumed": (
        "Nobody has published what PyTorch sees of {gpu}: its size less the gap of {reference} is assumed."
    ),
    "model-code-not-run": (
        "{model} brings code of its own, which is never run: what its configuration describes was weighed."
    ),
    "model-same-architecture": "`{asked}` has the architecture of {model}, whose configuration was taken.",
    # the card
    "bf16-not-in-hardware": (
        "{gpu} (compute capability {capability}) has no bfloat16: PyTorch emulates it, slowly, in the same memory; "
        "people take {instead}."
    ),
    "fp8-not-in-hardware": (
        "{gpu} (compute capability {capability}) has no 8-bit floats: {instead} runs instead."
    ),
    "flash-not-on-this-gpu": (
        "{gpu} (compute capability {capability}) cannot run flash attention: the {instead} kernel runs instead."
    ),
    "flash-package-refuses": (
        "The flash-attn package refuses to run on {gpu} (compute capability {capability}): take --attention sdpa."
    ),
    "outside-unknown": (
        "What the driver holds on {gpu} beside PyTorch is not known; it comes on top."
    ),
    # the verdict
    "fits-after-release": (
        "It fits only because PyTorch gives unused memory back to the device and tries again ({retries} times here); "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True wastes less."
    ),
    "managed-memory": (
        "The paged states ({bytes}) are managed memory: on the device while there is room, else the driver moves them "
        "to the host, and steps take longer."
    ),
    # the recipe
    "accumulation-keeps-gradients": (
        "Accumulating over {grad_accum} micro-batches keeps all gradients alive through forward and backward."
    ),
    "attention-falls-back": (
        "In transformers {family} does not know scaled_dot_product_attention: eager attention runs instead."
    ),
    "beyond-positions": (
        "{seq_len} tokens are more than the {max_positions} positions that the model was made for."
    ),
    "experts-not-quantised": (
        "bitsandbytes replaces linear layers only; the experts are stacked parameters here and are held as {dtype}."
    ),
    "kbit-preparation": (
        "K-bit preparation as {helper} does it turns what is not quantised into float32; "
        "--kbit-preparation none is without it, `trl` leaves embeddings and head."
    ),
    "target-unmatched": "The target `{target}` matches no module; PEFT ignores it, and so was it here.",
}


def note_text(note: Note) -> str:
    """Return a note in words. A parameter named `bytes` is written as a size, a whole number with separators."""
    params = {
        name: format_size(int(value))
        if name.endswith("bytes")
        else f"{value:,}"
        if isinstance(value, int)
        else printable(str(value), longest=_LONGEST_VALUE)
        for name, value in note.params.items()
    }
    return NOTES[note.code].format_map(params)
