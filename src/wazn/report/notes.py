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
        "{gpu}{chip} has no bfloat16: PyTorch emulates it, slowly, in the same memory; people take {instead}: "
        "--precision {precision}."
    ),
    "fp8-not-in-hardware": ("{gpu}{chip} has no 8-bit floats: {instead} runs instead."),
    "flash-not-on-this-gpu": (
        "{gpu}{chip} cannot run flash attention: the {instead} kernel runs instead."
    ),
    "flash-package-refuses": (
        "The flash-attn package refuses to run on {gpu}{chip}: take --attention sdpa."
    ),
    "outside-unknown": (
        "What the driver holds on {gpu} beside PyTorch is not known; it comes on top."
    ),
    "allocator-of-cuda": (
        "The allocator that is replayed is PyTorch's for CUDA; on {gpu} what is reserved beyond the tensors may differ."
    ),
    # the verdict
    "fits-after-release": (
        "PyTorch has to give unused memory back to the device and try again ({times} here), which costs time; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True wastes less."
    ),
    "managed-memory": (
        "The paged states ({bytes}) are managed memory: on the device while there is room, else the driver moves them "
        "to the host, and steps take longer."
    ),
    "thin-margin": (
        "{headroom_bytes} to spare is a thin margin: measured processes held 0.3 to 1.8 GiB more, outside PyTorch and "
        "in fragments, than is counted."
    ),
    # the rehearsal
    "rehearsed-instead": (
        "The real library code was rehearsed, because the architecture is not counted: {reason}."
    ),
    "kernels-assumed": (
        "The packages with this model's kernels (mamba-ssm, causal-conv1d, flash-linear-attention, RWKV's) count as "
        "installed; without them transformers' own code runs, which holds more and is slow."
    ),
    "micro-batches-alike": (
        "{run} of the {of} micro-batches of a step were rehearsed: from the third on all do the same in the same "
        "memory, but for the token ids that wait."
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
    "int8-keeps-inputs": (
        "bitsandbytes' int8 function keeps its input outside of what this checkpointing can drop; "
        "--checkpointing full-reentrant keeps none."
    ),
    "kbit-preparation": (
        "K-bit preparation as {helper} does it turns what is not quantised into float32. --kbit-preparation `trl`: as "
        "TRL 0.13 did (norms only); TRL 1.x does none: `none`."
    ),
    "published-quantised": (
        "The published weights are {format}; weights in {dtype}, made of them while loading, are assumed."
    ),
    "qlora-larger-than-lora": (
        "QLoRA makes this model larger than LoRA does here, as float32 experts outweigh what is quantised."
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
    params["chip"] = _chip(str(note.params.get("capability", "")))
    params["times"] = _times(int(note.params.get("retries", 0)))
    return NOTES[note.code].format_map(params)


def _chip(capability: str) -> str:
    """Write what a card's chip is called, in brackets; nothing where it has no name of its own.

    >>> _chip("7.5"), _chip("gfx942"), _chip("mps")
    (' (compute capability 7.5)', ' (gfx942)', '')
    """
    if capability[:1].isdecimal():
        return f" (compute capability {capability})"
    return f" ({capability})" if capability.startswith("gfx") else ""


def _times(number: int) -> str:
    """Write how often something happens.

    >>> _times(1), _times(2), _times(1234)
    ('once', 'twice', '1,234 times')
    """
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")
