"""What NVML says of a GPU: how active its SMs and its memory are, and the power that it draws.

Needs torch and pynvml (the package nvidia-ml-py) alone, so that programs made from traces can take it along.
It has not run on a GPU yet: its test puts other functions in the place of torch's.
"""

from __future__ import annotations

import csv
from pathlib import Path


def write_activity(file: Path, rank: int) -> bool:
    """Write `rank`, `sm_share`, `memory_share` (of the last second or less, as NVML samples) and `power_w`.

    Call it while the device is at work, or has just been. False, and no file, where NVML does not say.
    """
    import torch

    try:
        shares = torch.cuda.utilization() / 100, torch.cuda.memory_usage() / 100
        row = (rank, *shares, torch.cuda.power_draw() / 1000)
    except Exception:  # without pynvml, without its driver, or of a part of a GPU, each of which raises its own
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([("rank", "sm_share", "memory_share", "power_w"), row])
    return True
