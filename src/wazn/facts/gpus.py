"""From a GPU's name, as people write it, to the `Gpu`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from wazn.cluster import Gpu
from wazn.errors import InputError, UnknownFact
from wazn.facts.names import GpuName, nearest_names, parse_gpu_name
from wazn.facts.notes import Note
from wazn.facts.store import gpu_index, price_index

__all__ = [
    "GpuChoice",
    "LowestPrice",
    "gpu_by_id",
    "list_gpus",
    "lowest_price",
    "resolve_gpu",
    "search_gpus",
]

_LONGEST_NAME = 100
_LARGEST_CARD_GB = 2048
_COUNTED = r"(\d{1,5})\s*[x\N{MULTIPLICATION SIGN}]\s*([a-z0-9].*)"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuChoice:
    """What a name means. `candidates` are the ids it can mean, the taken one first; `notes` say what is assumed."""

    gpu: Gpu
    candidates: tuple[str, ...]
    notes: tuple[Note, ...] = ()


def gpu_by_id(gpu_id: str) -> Gpu:
    """Return the catalogue's GPU with exactly this id. Raises: KeyError."""
    return Gpu(**gpu_index()["gpus"][gpu_id])


def list_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs of the catalogue, in its order."""
    return tuple(Gpu(**record) for record in gpu_index()["gpus"].values())


def resolve_gpu(text: str) -> GpuChoice:
    """Return the GPU that a person means: an id, a product name, a part of one (`4090`, `a100-80gb`), or a size
    (`24GB`).

    A name that means several cards takes the common one (desktop or SXM) and says so; a size is a card of that size.

    Raises: UnknownFact with the nearest names; InputError for what is no name at all.
    """
    asked = text.strip()
    if (
        not asked or len(asked) > _LONGEST_NAME or asked[0] == "-"
    ):  # `-8GB` is no separator and a size
        raise InputError(
            f"expected the name of a GPU such as `rtx-4090` or `80GB`, found `{asked[:40]}`"
        )
    if asked.lower() in gpu_index()["gpus"]:
        return _choice(asked, [asked.lower()])
    name = parse_gpu_name(asked)
    if not name.base and not name.forms and name.memory_gb is not None:
        return _card_of_size(asked, name.memory_gb)
    candidates = _candidates(asked, name)
    preferred = gpu_index()["preferred"].get(name.base)
    if preferred in candidates:
        candidates = [preferred, *(other for other in candidates if other != preferred)]
    return _choice(asked, candidates)


def _choice(asked: str, ids: list[str]) -> GpuChoice:
    gpu = gpu_by_id(ids[0])
    notes: list[Note] = []
    if len(ids) > 1:
        params = {"asked": asked, "taken": ids[0], "others": ", ".join(ids[1:])}
        notes.append(Note(code="gpu-name-ambiguous", params=params))
    if gpu.usable_reference is not None:
        params = {"gpu": gpu.id, "reference": gpu.usable_reference}
        notes.append(Note(code="gpu-usable-memory-assumed", params=params))
    return GpuChoice(gpu=gpu, candidates=tuple(ids), notes=tuple(notes))


def _candidates(asked: str, name: GpuName) -> list[str]:
    index = gpu_index()
    if name.base in index["apple"]:
        return _apple(asked, name, index["apple"][name.base])
    of_base: list[str] = index["bases"].get(name.base, [])
    fitting = [
        gpu_id
        for gpu_id in of_base
        if name.forms <= set(index["forms"].get(gpu_id, ()))
        and name.memory_gb
        in (None, index["gpus"][gpu_id]["memory_gb"], *index["also_sold_as"].get(gpu_id, ()))
    ]
    if fitting:
        return fitting
    if of_base:
        raise UnknownFact(f"no such version of this GPU: `{asked}`", nearest=tuple(of_base[:5]))
    counted = re.fullmatch(_COUNTED, asked, re.ASCII | re.IGNORECASE)
    if counted is not None:
        raise InputError(
            f"`{asked}` is a number of GPUs and a name",
            hint=f"write --gpu {counted[2]} --gpus {counted[1]}",
        )
    if asked.isascii() and asked.isdecimal():
        raise InputError(f"`{asked}` is a number", hint=f"a card of that size is `{asked}GB`")
    nearest = _nearest(asked)
    hint = None if nearest else "`wazn gpus` lists what is known; a size such as `24GB` works too"
    raise UnknownFact(f"unknown GPU `{asked}`", nearest=nearest, hint=hint)


def _nearest(asked: str) -> tuple[str, ...]:
    """The ids that start like the question, else those spelled most like it."""
    ids = list(gpu_index()["gpus"])
    spelled = {gpu_id.rsplit("-", 1)[0]: gpu_id for gpu_id in reversed(ids)}
    near = nearest_names(asked.replace(" ", "-"), list(spelled) + ids)
    return tuple(dict.fromkeys(spelled.get(name, name) for name in near))


def _apple(asked: str, name: GpuName, sizes: list[int]) -> list[str]:
    ids = [f"apple-silicon-{size}gb" for size in sizes]
    if name.memory_gb is None:
        return ids
    if name.memory_gb not in sizes:
        known = ", ".join(f"{size}" for size in sizes)
        raise UnknownFact(f"`{asked}` was not made with that memory", hint=f"{known} GB are known")
    return [f"apple-silicon-{name.memory_gb}gb"]


def _card_of_size(asked: str, memory_gb: int) -> GpuChoice:
    """A card that is known only by its size behaves like the catalogue's card of that size, or the nearest one.

    Its usable memory is its size less the gap which that card shows, and is marked as assumed.
    """
    if not 1 <= memory_gb <= _LARGEST_CARD_GB:
        raise InputError(
            f"a card of `{asked}` does not exist", hint="name a GPU or a size such as `24GB`"
        )
    sizes: dict[str, list[Any]] = gpu_index()["sizes"]
    nearest = min(sizes, key=lambda size: (abs(int(size) - memory_gb), -sizes[size][0]))
    gap_bytes, reference = sizes[nearest]
    like: dict[str, Any] = dict(gpu_index()["gpus"][reference])
    usable_bytes = memory_gb * 2**30 - gap_bytes
    if usable_bytes <= 0:
        raise InputError(
            f"a card of `{asked}` does not exist", hint="name a GPU or a size such as `24GB`"
        )
    like.pop("max_per_node", None)
    like |= {"id": f"{memory_gb}gb", "name": f"{memory_gb} GB card", "memory_gb": memory_gb}
    like |= {"usable_bytes": usable_bytes, "usable_basis": "assumed", "usable_reference": reference}
    if like.get("context_bytes") is not None:
        like["context_basis"] = "assumed"
    params = {"asked": asked, "memory_gb": memory_gb, "reference": reference}
    return GpuChoice(
        gpu=Gpu(**like), candidates=(), notes=(Note(code="gpu-is-a-size", params=params),)
    )


class LowestPrice(NamedTuple):
    """The lowest on-demand price of a GPU in the price table, with its date: old prices are old."""

    usd_per_gpu_hour: float
    provider: str
    date: str


def lowest_price(gpu_id: str) -> LowestPrice | None:
    """Return the lowest dated price of one GPU for an hour, or None where the table has none."""
    price = price_index().get(gpu_id)
    return None if price is None else LowestPrice(**price)


def search_gpus(query: str) -> tuple[Gpu, ...]:
    """Return the GPUs whose id or name holds every word, else those that `resolve_gpu` would choose from.

    An empty query means all. Raises: UnknownFact if nothing is like it.
    """
    words = query.lower().split()
    if not words:
        return list_gpus()
    found = [
        gpu for gpu in list_gpus() if all(word in f"{gpu.id} {gpu.name.lower()}" for word in words)
    ]
    if found:
        return tuple(found)
    choice = resolve_gpu(query)
    return tuple(gpu_by_id(gpu_id) for gpu_id in choice.candidates) or (choice.gpu,)
