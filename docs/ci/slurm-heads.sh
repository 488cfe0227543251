#!/usr/bin/env bash
# The nightly on heads as an array of Slurm jobs, one a library; shardproof is installed where the jobs run. Clones and the
# folders of nights lie in the folder from which it is submitted, which the nodes share.
#
#   sbatch docs/ci/slurm-heads.sh
#
#SBATCH --job-name=shardproof-heads
#SBATCH --array=0-2
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=02:00:00
set -euo pipefail
systems=(megatron-core megatron-fsdp deepspeed)
repositories=(NVIDIA/Megatron-LM NVIDIA/Megatron-LM deepspeedai/DeepSpeed)
system=${systems[$SLURM_ARRAY_TASK_ID]}
clone=clones/$system.git
if [ -d "$clone" ]; then
  git -C "$clone" fetch --quiet --prune origin '+refs/heads/*:refs/heads/*'
else
  git clone --quiet --bare "https://github.com/${repositories[$SLURM_ARRAY_TASK_ID]}" "$clone"
fi
shardproof night "$system" --clone "$system=$clone" --jobs "$SLURM_CPUS_PER_TASK" --out "reports/night-$system"
