"""The spelling of names: what people type, brought to one form.

The same functions prepare the tables and answer questions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = [
    "GpuName",
    "fold_model_name",
    "loose_model_name",
    "nearest_names",
    "parse_gpu_name",
]

_OTHER_SEPARATORS = re.compile(r"(?<!\d)[-_:\s]+|[-_:\s]+(?!\d)")


def fold_model_name(text: str) -> str:
    """Return a model's name without the differences that people do not mean.

    Case goes, separators go except between two digits, where `-` stays and `_` is a point: `phi-1_5` is `phi-1.5`, and
    `pythia-14b` is not `pythia-1.4b`.

    >>> fold_model_name("Llama-3.1-8B"), fold_model_name("llama3.1 8b"), fold_model_name("phi_1_5")
    ('llama3.1-8b', 'llama3.1-8b', 'phi1.5')
    """
    text = text.strip().lower()
    text = re.sub(r"(?<=\d)_(?=\d)", ".", text)
    text = re.sub(r"(?<=\d)[:\s]+(?=\d)", "-", text)
    return _OTHER_SEPARATORS.sub("", text)


def loose_model_name(folded: str) -> str:
    """Return the folded name with `-` between digits read as a point: for `llama-3-1-8b`.

    >>> loose_model_name(fold_model_name("llama-3-1-8b"))
    'llama3.1.8b'
    """
    return re.sub(r"(?<=\d)-(?=\d)", ".", folded)


class GpuName(NamedTuple):
    """A GPU's name taken apart: `4060ti`, {laptop}, 8 GB. `form` words are sets, because people leave them out."""

    base: str
    forms: frozenset[str]
    memory_gb: int | None


_GPU_NOISE = frozenset(
    (
        *("nvidia", "geforce", "rtx", "rx", "gtx", "tesla", "amd", "instinct", "radeon"),
        *("apple", "intel", "gpu", "card", "graphics", "generation", "gen", "edition"),
        *("tensor", "core", "memory", "unified", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6"),
    )
)
_GPU_FORMS = {
    "sxm": "sxm", "sxm2": "sxm", "sxm3": "sxm", "sxm4": "sxm", "sxm5": "sxm", "hgx": "sxm",
    "pcie": "pcie", "pci": "pcie", "nvl": "nvl",
    "laptop": "laptop", "mobile": "laptop", "notebook": "laptop",
    "modded": "modded", "mod": "modded", "quadro": "quadro", "ada": "ada", "blackwell": "blackwell", "sff": "sff",
    "ws": "ws", "workstation": "ws", "server": "server", "se": "server", "maxq": "maxq",
}  # fmt: skip
_GPU_SEPARATORS = re.compile(r"[-_\s/()]+")
_GPU_SIZE = re.compile(r"(.*?)(?<!\d)(\d{1,9})gi?b|()(\d{1,9})g", re.ASCII)  # not the g of `a10g`
_GLUED = re.compile(
    r"(rtx|rx|gtx|geforce|tesla|quadro)(?=\d)(.*)|(.*\d)(laptop|mobile|sxm\d?|pcie|nvl)"
)


def parse_gpu_name(text: str) -> GpuName:
    """Return a GPU's name taken apart; words that make no difference are left out.

    >>> parse_gpu_name("NVIDIA GeForce RTX 4060 Ti 16GB")
    GpuName(base='4060ti', forms=frozenset(), memory_gb=16)
    >>> parse_gpu_name("a100-sxm4-80gb").base, parse_gpu_name("24 GiB")
    ('a100', GpuName(base='', forms=frozenset(), memory_gb=24))
    """
    text = text.strip().lower().replace("max-q", "maxq").replace("max q", "maxq")
    text = re.sub(r"(?<=\d)\s+(?=g(i?b)?\b)", "", text)
    base: list[str] = []
    forms: set[str] = set()
    memory_gb: int | None = None
    words = [word for word in _GPU_SEPARATORS.split(text) if word]
    while words:
        word = words.pop(0)
        glued = _GLUED.fullmatch(word)
        sized = _GPU_SIZE.fullmatch(word)
        if word in _GPU_NOISE:
            continue
        if word in _GPU_FORMS:
            forms.add(_GPU_FORMS[word])
        elif glued is not None:
            words[:0] = [part for part in glued.groups() if part]
        elif sized is not None and memory_gb is None:
            memory_gb = int(sized[2] or sized[4])
            words[:0] = [sized[1]] if sized[1] else []
        else:
            base.append(word)
    return GpuName("".join(base), frozenset(forms), memory_gb)


def nearest_names(text: str, names: Iterable[str], *, at_most: int = 5) -> tuple[str, ...]:
    """Return the names most like what was typed, best first. difflib is imported only here, for a wrong question."""
    import difflib

    text = text.lower()[:100]
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(text, by_lower, n=at_most, cutoff=0.5)
    return tuple(by_lower[name] for name in close)
