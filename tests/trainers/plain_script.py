"""A training script without torch: one weight, written as safetensors by hand over the last checkpoint.

    plain_script.py FOLDER UNTIL [WORD]...

Words: `renames` writes a new file first, `syncs` it, `begins-anew` where the file cannot be read, `trusts` a file that
ends early, `fails`, `hangs`; `links` keeps a folder for each step, and a symbolic link to the latest.
"""

import json
import os
import struct
import sys
import time
from pathlib import Path

folder, until, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
last = folder / ("LATEST/last.safetensors" if "links" in words else "last.safetensors")
ELEMENTS = 1024
STEP = 4 * ELEMENTS
HEADER = json.dumps(
    {
        "model.weight": {"dtype": "F32", "shape": [ELEMENTS], "data_offsets": [0, STEP]},
        "step": {"dtype": "F32", "shape": [1], "data_offsets": [STEP, STEP + 4]},
    }
).encode()


def write(path: Path, step: int, value: float) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(HEADER)) + HEADER)
        file.write(struct.pack("<f", value) * ELEMENTS)
        file.write(struct.pack("<f", step))
        if "syncs" in words:
            os.fsync(file.fileno())


def read() -> tuple[int, float]:
    data = last.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    values = data[8 + size :]
    if "trusts" in words:
        values = values.ljust(STEP + 4, b"\0")
    return int(struct.unpack("<f", values[STEP : STEP + 4])[0]), struct.unpack("<f", values[:4])[0]


if "hangs" in words:
    (folder / "pid").write_text(str(os.getpid()))
    time.sleep(1000)
if "fails" in words:
    sys.exit("this script ends with an error")
step, value = 0, 1.0
if last.exists():
    try:
        step, value = read()
    except struct.error as error:
        if "begins-anew" not in words:
            sys.exit(f"cannot read the checkpoint: {error}")
while step < until:
    step, value = step + 1, value * 1.5 + step
    if "links" in words:
        inside, link = folder / f"step_{step}", folder / "NEW"
        inside.mkdir(exist_ok=True)
        write(inside / last.name, step, value)
        link.unlink(missing_ok=True)
        link.symlink_to(inside.name)
        link.replace(folder / "LATEST")
        continue
    fresh = last.with_suffix(".new") if "renames" in words else last
    write(fresh, step, value)
    fresh.replace(last)
