#!/usr/bin/env bash
# A notebook inside a batch job: Cluster(5) in it takes the hosts and tasks of the job.
#   sbatch notebooks/slurm.sh              starts JupyterLab on the job's first host; the log says how to reach it
#   sbatch notebooks/slurm.sh my_script.py runs a script instead
# Four GPUs on each of two nodes (most clusters also want --partition and --account):
#   sbatch --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=8 --gpus-per-node=4 notebooks/slurm.sh
#   qsub -koed -l select=2:ncpus=32:mpiprocs=4:ngpus=4 notebooks/slurm.sh    (PBS; -koed writes the log at once)
#SBATCH --job-name=mpi4dl_nb
#SBATCH --nodes=2
#SBATCH --ntasks=5
#SBATCH --time=02:00:00
#SBATCH --output=mpi4dl_nb-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-${PBS_O_WORKDIR:-$PWD}}"
# module load ...   load your cluster's modules here
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi # the same folder on every host: shared, or installed on each

if [ $# -gt 0 ]; then
    exec python "$@"
fi
port=$(python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
echo "On your own machine: ssh -N -J $USER@LOGIN_HOST -L $port:127.0.0.1:$port $USER@$(hostname)"
echo "Then open the address below that begins with http://127.0.0.1:$port"
exec jupyter lab --no-browser --ip=127.0.0.1 --port="$port" --notebook-dir=notebooks
