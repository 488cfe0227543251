"""Links from bug ids in rules and faults to the public trackers: `PT-164929` is issue or pull request 164929 of
pytorch/pytorch.

An id is short, so that a rule can carry ten of them; a reader of a report can only follow an address. A letter behind
the number tells several bugs of one thread apart. Few bugs are told of in a commit, in a fork, or in a pull request
whose address their entry in `issues.toml` has: those are listed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

REPOSITORIES = {
    "ACC": "huggingface/accelerate",
    "AM": "NVIDIA-NeMo/Automodel",
    "AO": "pytorch/ao",
    "APEX": "NVIDIA/apex",
    "CAI": "hpcaitech/ColossalAI",
    "DS": "deepspeedai/DeepSpeed",
    "FO": "databricks/flashoptim",
    "FS": "facebookresearch/fairscale",
    "HF": "huggingface/transformers",
    "MBR": "NVIDIA-NeMo/Megatron-Bridge",
    "MLM": "NVIDIA/Megatron-LM",
    "PL": "Lightning-AI/pytorch-lightning",
    "PT": "pytorch/pytorch",
    "TE": "NVIDIA/TransformerEngine",
    "TT": "pytorch/torchtitan",
}

ELSEWHERE = {
    "MBR-3949": "NVIDIA-NeMo/Megatron-Bridge/pull/3949",
    "MLM-1505db": "NVIDIA/Megatron-LM/commit/1505db4cc4e9e94ee22583c76f7e425ea34f5aea",
    "MLM-2895": "NVIDIA/Megatron-LM/commit/8dd03a39ccc67a93c186cfe16fa782ac7144480d",
    "MLM-3014": "NVIDIA/Megatron-LM/commit/ed46806838c82d875c4ed71bc7b0390de8e037c8",
    "MLM-ROCM63": "ROCm/Megatron-LM/pull/63",
    "MLM-RX67": "radixark/Megatron-LM/pull/67",
    "MLM-SKY1403a": "NovaSky-AI/SkyRL/pull/1403",
    "MLM-VERL4870": "verl-project/verl/pull/4870",
    "MLM-mr2871": "NVIDIA/Megatron-LM/commit/2922bb6d753cc2653d35cfa2d5a27a419b2c7ad6",
    "MLM-mr3394": "NVIDIA/Megatron-LM/commit/9a45638758de6bb6d1a2951185a2d5999e1dad92",
    "ORB-2714": "SlopDotCash/asi/pull/2714",
}

_ID = re.compile(r"([A-Z]+)-([0-9]+)[a-z]?")


SHOWN = 3
"""How many addresses a line of text has room for."""


def compared(bugs: Sequence[str]) -> str:
    """What a line of text says of public bugs with the same mechanism, behind what it says before; empty for none."""
    links = [address_of(bug) or bug for bug in bugs]
    more = f" and {len(links) - SHOWN} more" if len(links) > SHOWN else ""
    return f"; compare {', '.join(links[:SHOWN])}{more}" if links else ""


def address_of(bug: str) -> str:
    """The address of a public bug; empty for an id of somebody else's, as a plugin's rule may have.

    A number stands for an issue or a pull request: the address of either leads to the other.
    """
    if bug in ELSEWHERE:
        return f"https://github.com/{ELSEWHERE[bug]}"
    parts = _ID.fullmatch(bug)
    repository = REPOSITORIES.get(parts[1]) if parts else None
    return f"https://github.com/{repository}/issues/{parts[2]}" if parts and repository else ""


def short(address: str) -> str:
    """How a page names a public place: `torchtitan #4382` of an issue or pull request on GitHub, `owner/name abcdef0`
    of a commit, and of anything else the host."""
    if found := re.match(r"https://github\.com/[^/]+/([^/]+)/(?:issues|pull|discussions)/(\d+)", address):
        return f"{found[1]} #{found[2]}"
    if found := re.match(r"https://github\.com/([^/]+/[^/]+)/commit/([0-9a-f]{7})", address):
        return f"{found[1]} {found[2]}"
    return re.sub(r"^https?://([^/]+).*", r"\1", address)
