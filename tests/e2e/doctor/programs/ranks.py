"""Two ranks with gloo: `python ranks.py RANK FILE`. Rank 1 never comes to the all_reduce."""

import sys
import threading

import torch
import torch.distributed as dist


def main(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    print("ready", flush=True)  # noqa: T201  # the test reads it
    if rank == 0:
        dist.all_reduce(torch.zeros(1))
    threading.Event().wait()


torch.set_num_threads(1)
main(int(sys.argv[1]), sys.argv[2])
