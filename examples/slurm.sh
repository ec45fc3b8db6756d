#!/bin/bash
# One process for each GPU of two nodes: sbatch slurm.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --gpu-bind=none
#SBATCH --requeue
#SBATCH --signal=USR1@120

# train.py has kt.HorovodStrategy(), and kt.Backup, which saves and ends at SIGUSR1.
# Ranks that end one after another with code 75 are not killed meanwhile.
srun --cpus-per-task=8 --kill-on-bad-exit=0 python train.py
if [ $? -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
