"""The cluster of a row of a table: its GPU's sheet and usual platform, the network that the row or its owner names."""

from __future__ import annotations

import re

import msgspec

from lumos_nb.config import Fabric, Gpu, find_fabric, find_gpu, gpus, names_of
from lumos_nb.errors import InputError
from lumos_nb.layout import Cluster
from lumos_nb.workloads import table_words as words
from lumos_nb.workloads.table_cells import Reader


def cluster_of(reader: Reader, count: int) -> Cluster:
    """Nodes of the GPU's usual platform; the network between them as stated in the notes, else the usual one."""
    gpu = _gpu(reader)
    if (platform := words.PLATFORMS.get(gpu.name)) is None:
        raise reader.refusal("gpu", f"no usual platform is known; give one of {', '.join(words.PLATFORMS)}")
    inside: Fabric | str = platform.inside
    sheet, most = find_fabric(platform.inside), platform.gpus
    if sheet.max_gpus and sheet.max_gpus < most:  # the same links with more switches
        inside = msgspec.structs.replace(sheet, max_gpus=most)
    elif stated := reader.noted("gpus_per_node"):
        most = int(stated)
    per_node = max(size for size in range(1, most + 1) if count % size == 0)
    reader.assume(f"{gpu.name}s are joined by {platform.inside}, {per_node} in one domain")
    between = _network(reader, platform.between, per_node) if count > per_node else None
    return Cluster(
        gpu=gpu.name, nodes=count // per_node, gpus_per_node=per_node, inside=inside if per_node > 1 else None,
        between=between,
    )  # fmt: skip


def _gpu(reader: Reader) -> Gpu:
    """The sheet of a name, or of the longest name that it begins with, with as much memory if that is said."""
    text = re.sub(r"^(nvidia|amd)( instinct)? ", "", reader.text("gpu"))
    if not text:
        raise reader.refusal("gpu", "the row cannot be read without it: give it")
    try:
        return find_gpu(text)
    except InputError:
        plain = _plain(text)
        known = [
            (_plain(name), sheet) for sheet in gpus() for name in names_of(sheet) if plain.startswith(_plain(name))
        ]
        start, found = max(known, key=lambda pair: len(pair[0]), default=("", None))
        if not found or re.search(r"pcie|nvl", plain.removeprefix(start)):
            raise
        memory = re.search(r"\d+gb", plain.removeprefix(start))
        kin = _plain(found.name).replace("80gb", memory[0] if memory else "80gb")
        sheet = next((gpu for gpu in gpus() if _plain(gpu.name) == kin), found)
        reader.assume(f"gpu {text!r} is read as {sheet.name}")
        return sheet


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _network(reader: Reader, usual: str, per_node: int) -> Fabric | str:
    """The network as notes say, as its owner is known to have it, or the platform's usual one (a sheet's name)."""
    source = reader.text("source")
    usual = next((network for owner, network in words.OWNERS.items() if owner in source), usual)
    said = [re.search(pattern, text) for text in (reader.text("notes"), usual) for pattern in words.NETWORKS]
    found = next(filter(None, said), None)
    if not found or found.string == usual:
        reader.assume(f"the network is not stated: {usual}")
    if not found:
        return usual
    rate = float(found["rate"]) * float(found.groupdict().get("count") or 1) / 8 * 1e9 / per_node
    for name in words.NETWORK_SHEETS:
        if abs(rate / find_fabric(name).bytes_per_s - 1) < 0.01:
            return name
    latency_us = find_fabric(words.NETWORK_SHEETS[0]).latency_us
    return Fabric(name=found[0], source="the notes of the row", bytes_per_s=rate, latency_us=latency_us)
