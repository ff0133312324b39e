"""A sweep on SLURM: python slurm_sweep.py grid.toml /shared/runs --account my-project --queue standard --jobs 20

Needs pip install 'largeprompt[cluster]' dask-jobqueue. The scheduler and the driver are this process: start it on a
node that may stay up (in tmux, or as a job of its own). Start it again at any time; finished runs are skipped.
"""

import argparse
import sys

import largeprompt
from largeprompt import lab


class Aloud(lab.Progress):
    """Says a line for each run that fails, and for whatever a user should know."""

    def close(self, name: str, outcome: str = "") -> None:
        if outcome.startswith("failed"):
            print(f"{name} {outcome}", file=sys.stderr)

    def warn(self, message: str) -> None:
        print(message, file=sys.stderr)


def main() -> int:
    """Workers come and go as SLURM lets them; the sweep ends when every run has."""
    from dask_jobqueue import SLURMCluster
    from distributed import Client

    options = argparse.ArgumentParser()
    options.add_argument("grid")
    options.add_argument("store", help="a folder that all nodes see, or an address such as s3://bucket/runs")
    options.add_argument("--account")
    options.add_argument("--queue")
    options.add_argument("--jobs", type=int, default=10)
    given = options.parse_args()
    largeprompt.use_float64()
    runs = lab.runs_from(lab.read_toml(given.grid))
    with SLURMCluster(
        account=given.account,
        queue=given.queue,
        cores=16,  # of a job: 16 workers of one thread each
        processes=16,
        memory="32GB",
        walltime="04:00:00",
        # leave before the wall, not all at once: a run that is cut off goes on elsewhere from its checkpoint
        worker_extra_args=["--lifetime", "230m", "--lifetime-stagger", "5m"],
        job_script_prologue=["export NUMBA_CACHE_DIR=/tmp/$USER-numba"],
        log_directory="slurm-logs",
    ) as cluster:
        cluster.adapt(minimum_jobs=1, maximum_jobs=given.jobs)
        with Client(cluster, set_as_default=False) as client:
            outcome = lab.sweep_on(runs, lab.store_at(given.store), client, progress=Aloud())
    print(f"{outcome.finished} of {outcome.runs} runs are finished, {len(outcome.failed)} failed")
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
