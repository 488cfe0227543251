#!/usr/bin/env bash
# The nightly as an array of Slurm jobs, each a part; shardproof is installed where the jobs run.
#
#   array=$(sbatch --parsable docs/ci/slurm.sh)
#   sbatch --dependency=afterany:$array --wrap 'shardproof merge reports/part-* --out reports/nightly'
#
#SBATCH --job-name=shardproof
#SBATCH --array=1-4
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=01:30:00
set -euo pipefail
shardproof run nightly --system "${SYSTEM:-megatron-core}" --jobs "$SLURM_CPUS_PER_TASK" \
  --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" --out "reports/part-$SLURM_ARRAY_TASK_ID"
