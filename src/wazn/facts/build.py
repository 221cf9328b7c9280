"""Prepare the readable tables for reading in a millisecond: `python -m wazn.facts.build` (or `scripts/build_facts`).

The readable sources are `models/*.json`, `gpus.toml`, `gpu_names.toml`, `model_names.toml`, `overheads.toml` and
`prices.csv`; what is made of them lies in `prepared/` and is never edited. A test holds the two equal. Nothing but
the test and the script imports this module.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from wazn.facts.names import fold_model_name, parse_gpu_name
from wazn.facts.store import FOLDER

__all__ = [
    "gpu_index",
    "load_toml",
    "main",
    "memory_kind",
    "model_index",
    "prepared",
    "price_index",
    "short_model_names",
]

GIB = 2**30
_Row = dict[str, Any]


def load_toml(name: str) -> _Row:
    """Return one readable TOML table of this folder."""
    with open(os.path.join(FOLDER, name), "rb") as file:
        return tomllib.load(file)


# --- GPUs ----------------------------------------------------------------------------------------

# The chips of these compute capabilities have stacked memory (HBM) and no other: GP100, GV100, GA100, GH100, GB100,
# GB300.
_HBM_CAPABILITIES = ("6.0", "7.0", "8.0", "9.0", "10.0", "10.3")


def memory_kind(gpu: Mapping[str, Any]) -> str:
    """Return the kind of a card's memory, on which the gap between nominal and usable depends.

    unified: shared with the host, the gap is a fraction. hbm: stacked memory with its own ECC bits. gddr-ecc: ECC
    stored in the memory itself and on by default: 1/16 of it is gone (runtime observations: 45.0 of 48 GB on L40S,
    15.0 of 16 on T4). gddr: the rest.
    """
    if gpu["class"] == "integrated":
        return "unified"
    if gpu["compute_capability"] in _HBM_CAPABILITIES or gpu["arch"].startswith(("cdna", "gaudi")):
        return "hbm"
    return "gddr-ecc" if gpu["ecc"] == "default-on" else "gddr"


def _nominal_gib(gpu: Mapping[str, Any]) -> int:
    """The nominal size of one device: a board with two devices (MI250X) is two GPUs to PyTorch."""
    return int(gpu["memory_gb"]) // int(gpu.get("devices_per_board", 1))


def _assumed_usable(gpu: _Row, observed: list[_Row]) -> tuple[int, str]:
    """Nominal less the gap of the nearest card of its kind, in bytes, and that card's id.

    Nearest: same maker, kind and generation before same maker and kind, before same kind; then by size; then the
    larger gap.
    """
    kind = memory_kind(gpu)
    nominal = _nominal_gib(gpu)
    peers = [card for card in observed if memory_kind(card) == kind]
    nearness = lambda card: (  # noqa: E731
        card["vendor"] != gpu["vendor"],
        card["arch"] != gpu["arch"],
        abs(_nominal_gib(card) - nominal),
        card["usable_gib"] - _nominal_gib(card),
        card["id"],
    )
    reference = min(peers, key=nearness)
    return _less_gap(nominal, kind, reference), reference["id"]


def _less_gap(nominal_gib: int, kind: str, reference: _Row) -> int:
    reference_nominal = _nominal_gib(reference)
    usable = reference["usable_gib"]
    if kind == "unified":
        return int(nominal_gib * GIB * usable / reference_nominal)
    # what ECC takes grows with the memory, the rest of the gap does not
    share = 1 / 16 if kind == "gddr-ecc" else 0.0
    fixed_gib = reference_nominal * (1 - share) - usable
    return int((nominal_gib * (1 - share) - fixed_gib) * GIB)


def _context(gpu: _Row, by_arch: Mapping[str, _Row]) -> _Row:
    """The context of a card: its own direct measurement, else the highest of its generation; nothing outside NVIDIA."""
    if "cuda_context_mib" in gpu:
        mib = gpu["cuda_context_mib"]
        seen = next(row for row in gpu["context_observations"] if row["mib"] == mib)
        source = f"{seen['how']}; {seen['ref']}"
        return {"context_bytes": mib * 2**20, "context_basis": "measured", "context_source": source}
    row = by_arch.get(gpu["arch"])
    if gpu["vendor"] != "nvidia" or row is None:
        return {}
    source = f"{row['from']}: {row['how']}; {row['source']}"
    return {
        "context_bytes": row["mib"] * 2**20,
        "context_basis": "assumed",
        "context_source": source,
    }


def _gpu_record(gpu: _Row, observed: list[_Row], contexts: Mapping[str, _Row]) -> _Row:
    devices = gpu.get("devices_per_board", 1)
    record = {key: gpu[key] for key in ("id", "name", "vendor", "arch", "compute_capability")}
    record |= {"memory_gb": _nominal_gib(gpu)}
    if "usable_gib" in gpu:
        record |= {"usable_bytes": int(gpu["usable_gib"] * GIB), "usable_basis": "measured"}
    else:
        usable_bytes, reference = _assumed_usable(gpu, observed)
        record |= {"usable_bytes": usable_bytes, "usable_basis": "assumed"}
        record |= {"usable_reference": reference}
    record |= {key: gpu[key] for key in ("supports_bf16", "supports_fp8")}
    if "memory_bandwidth_gb_s" in gpu:
        record["memory_bandwidth_gb_s"] = gpu["memory_bandwidth_gb_s"] / devices
    if "max_per_node" in gpu:
        record["max_per_node"] = gpu["max_per_node"]
    return record | _context(gpu, contexts)


# forms in the order in which they are taken when a name leaves them open
_FORM_ORDER = (
    "sxm",
    "",
    "ada",
    "blackwell",
    "ws",
    "server",
    "pcie",
    "nvl",
    "maxq",
    "sff",
    "quadro",
    "laptop",
    "modded",
)


def _forms(gpu: _Row) -> frozenset[str]:
    """What a person may say about the form of a card: the words of its id and of its product name."""
    return parse_gpu_name(gpu["id"]).forms | parse_gpu_name(gpu["name"]).forms


def _common_first(gpu: _Row) -> tuple[int, int, str]:
    """Desktop and SXM cards before PCIe before laptops and modified cards; then the smaller memory."""
    forms = parse_gpu_name(gpu["id"]).forms or {""}
    return max(_FORM_ORDER.index(form) for form in forms), _nominal_gib(gpu), gpu["id"]


def _size_references(gpus: list[_Row]) -> dict[str, list[Any]]:
    """For each nominal size: the gap in bytes that a card of that size shows, and which card showed it.

    Of NVIDIA's cards: a desktop card where there is one of that size, else the one with the largest gap.
    """
    references: dict[str, list[Any]] = {}
    ordinary = [
        gpu
        for gpu in gpus
        if gpu["vendor"] == "nvidia"
        and memory_kind(gpu) != "unified"
        and "usable_gib" in gpu
        and not parse_gpu_name(gpu["id"]).forms & {"laptop", "modded"}
    ]
    for size in sorted({_nominal_gib(gpu) for gpu in ordinary}):
        of_size = [gpu for gpu in ordinary if _nominal_gib(gpu) == size]
        desktop = [gpu for gpu in of_size if gpu["class"] == "consumer"]
        card = min(desktop or of_size, key=lambda gpu: (gpu["usable_gib"], gpu["id"]))
        references[str(size)] = [size * GIB - int(card["usable_gib"] * GIB), card["id"]]
    return references


def _blas_workspaces(rows: list[_Row]) -> list[list[Any]]:
    """[vendor, prefix of the compute capability, first torch release, bytes, source], in the order of the table."""
    return [
        [
            row["vendor"],
            prefix,
            [int(part) for part in row["since_torch"].split(".")],
            row["kib"] * 2**10,
            row["source"],
        ]
        for row in rows
        for prefix in row["capabilities"]
    ]


def gpu_index() -> _Row:
    """Return what `facts.gpus` needs: records by id, ids by the base of the name, Apple's chips, gaps by size.

    `bases` lists ids with the common card first; `forms` the words for a card's form. `sizes` maps a nominal size to
    [gap in bytes, the card that shows it].
    """
    gpus: list[_Row] = load_toml("gpus.toml")["gpu"]
    names = load_toml("gpu_names.toml")
    overheads = load_toml("overheads.toml")
    contexts = {row["arch"]: row for row in overheads["context"]}
    observed = [gpu for gpu in gpus if "usable_gib" in gpu]
    bases: dict[str, list[str]] = {}
    for gpu in sorted(gpus, key=_common_first):
        bases.setdefault(parse_gpu_name(gpu["id"]).base, []).append(gpu["id"])
    for asked, target in names["aliases"].items():
        bases[parse_gpu_name(asked).base] = bases[parse_gpu_name(target).base]
    return {
        "gpus": {gpu["id"]: _gpu_record(gpu, observed, contexts) for gpu in gpus},
        "bases": bases,
        "forms": {gpu["id"]: sorted(_forms(gpu)) for gpu in gpus if _forms(gpu)},
        "preferred": {parse_gpu_name(key).base: value for key, value in names["preferred"].items()},
        "also_sold_as": names["also_sold_as"],
        "apple": {parse_gpu_name(chip).base: sizes for chip, sizes in names["apple"].items()},
        "sizes": _size_references(gpus),
        "blas_workspaces": _blas_workspaces(overheads["blas_workspace"]),
    }


# --- prices --------------------------------------------------------------------------------------


def price_index() -> _Row:
    """Return the lowest on-demand price of each GPU: {gpu_id: {usd_per_gpu_hour, provider, date}}.

    Only rows with a date count; of a GPU's rows, those within a year of its newest, so that an old low price does not
    hide a new one.
    """
    with open(os.path.join(FOLDER, "prices.csv"), encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["catalogue_date"] and row["spot"] == "0"]
    lowest: _Row = {}
    for gpu_id in sorted({row["gpu_id"] for row in rows}):
        of_gpu = [row for row in rows if row["gpu_id"] == gpu_id]
        newest = max(row["catalogue_date"] for row in of_gpu)
        a_year_before = f"{int(newest[:4]) - 1}{newest[4:]}"
        recent = [row for row in of_gpu if row["catalogue_date"] >= a_year_before]
        row = min(recent, key=lambda row: (float(row["price_per_gpu_min_usd_h"]), row["provider"]))
        lowest[gpu_id] = {
            "usd_per_gpu_hour": float(row["price_per_gpu_min_usd_h"]),
            "provider": row["provider"],
            "date": row["catalogue_date"],
        }
    return lowest


# --- models --------------------------------------------------------------------------------------


def _model_files() -> dict[str, _Row]:
    folder = os.path.join(FOLDER, "models")
    files: dict[str, _Row] = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            files[name.removesuffix(".json").replace("--", "/", 1)] = json.load(file)
    return files


_PREFIXES = ("meta-", "c4ai-", "nvidia-", "ai21-")
_OPTIONAL_WORD = re.compile(
    r"hf|base|instruct|chat|it|pt|preview|bf16|8k|4k|\d{4}|v\d+(\.\d+)*", re.ASCII
)


def short_model_names(model_id: str) -> dict[str, int]:
    """Return the folded short names of a model with how many words of its id each leaves out.

    Left out, from the fewest to all: a maker's prefix (`Meta-`) and the words that say which release of an
    architecture it is (`hf`, `base`, `instruct`, `chat`, `it`, `v0.1`, `2407`).

    >>> short_model_names("mistralai/Mixtral-8x7B-v0.1")
    {'mixtral8x7bv0.1': 0, 'mixtral8x7b': 1}
    """
    name = model_id.rpartition("/")[2].lower()
    prefixed = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    words = name[len(prefixed) :].split("-")
    optional = [
        i for i, word in enumerate(words) if i > 0 and _OPTIONAL_WORD.fullmatch(word) is not None
    ]
    names: dict[str, int] = {fold_model_name(name): 0}
    for mask in range(2 ** len(optional)):
        left_out = {index for bit, index in enumerate(optional) if mask >> bit & 1}
        short = "-".join(word for i, word in enumerate(words) if i not in left_out)
        rank = len(left_out) + (1 if prefixed else 0)
        folded = fold_model_name(short)
        names[folded] = min(rank, names.get(folded, rank))
    return names


def _siblings(files: Mapping[str, _Row]) -> dict[str, str]:
    """Ids outside the catalogue, in lower case, with the entry that has their architecture."""
    own = {model_id.lower() for model_id in files}
    found: dict[str, str] = {}

    def add(sibling: str, model_id: str) -> None:
        if sibling.lower() not in own:
            found.setdefault(sibling.lower(), model_id)

    for model_id, others in load_toml("model_names.toml")["siblings"].items():
        for sibling in others:
            add(sibling, model_id)
    for model_id, config in files.items():
        for key in ("_same_architecture_as", "_published_params_of"):
            sibling = config.get(key)
            if sibling is not None and "AWQ" not in sibling:  # packed weights: another count
                add(sibling, model_id)
    return found


def _short_names(ids_to_targets: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Each short name with the entries it can mean; only those that leave out the fewest words of their id."""
    ranked: dict[str, dict[str, int]] = {}
    for name_id, target in ids_to_targets:
        for short, rank in short_model_names(name_id).items():
            ranks = ranked.setdefault(short, {})
            ranks[target] = min(rank, ranks.get(target, rank))
    return {
        short: sorted(target for target, rank in ranks.items() if rank == min(ranks.values()))
        for short, ranks in ranked.items()
    }


def model_index() -> _Row:
    """Return what `facts.models` needs: rows by id, names in folded form, and ids of the same architecture.

    `models` maps an id to [model_type, parameters counted, published parameters or null, status]; `ids` maps every
    known id in lower case to its entry; `names` maps a folded short name to the entries it can mean.
    """
    files = _model_files()
    tables = load_toml("model_names.toml")
    siblings = _siblings(files)
    names = _short_names(siblings.items()) | _short_names(
        (model_id, model_id) for model_id in files
    )
    names |= {fold_model_name(name): ids for name, ids in tables["ambiguous"].items()}
    names |= {fold_model_name(name): [model_id] for name, model_id in tables["aliases"].items()}
    return {
        "models": {
            model_id: [
                config["model_type"],
                config["_meta_params"],
                config["_published_params"],
                config["_meta_status"],
            ]
            for model_id, config in files.items()
        },
        "ids": {model_id.lower(): model_id for model_id in files} | siblings,
        "names": dict(sorted(names.items())),
    }


def prepared() -> dict[str, str]:
    """Return the text of every prepared file by its name."""
    indexes = {"gpus.json": gpu_index(), "models.json": model_index(), "prices.json": price_index()}
    return {
        name: json.dumps(index, ensure_ascii=False, separators=(",", ":")) + "\n"
        for name, index in indexes.items()
    }


def main(arguments: list[str]) -> int:
    """Write the prepared files, or with `--check` say which are not what the sources give."""
    folder = os.path.join(FOLDER, "prepared")
    os.makedirs(folder, exist_ok=True)
    stale = 0
    for name, text in prepared().items():
        path = os.path.join(folder, name)
        old = None
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                old = file.read()
        if old == text:
            continue
        stale += 1
        if "--check" in arguments:
            print(f"{path} is not what its sources give: run scripts/build_facts", file=sys.stderr)
        else:
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
            print(f"wrote {path}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
