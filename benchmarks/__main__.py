"""`make bench`: what is counted, then every benchmark, one after the other, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
}  # fmt: skip
BENCHMARKS = (
    "work", "bench_reference", "bench_start", "bench_world", "bench_trainer", "bench_megatron", "bench_report",
    "bench_diagnosis",
)  # fmt: skip


def main() -> int:
    """Run them; the first failing exit status."""
    for name in BENCHMARKS:
        print(f"== {name}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], env={**os.environ, **ENVIRONMENT})
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
