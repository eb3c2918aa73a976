"""A DataLoader in a thread of its own: `healthy` (slow workers) or `dead` (one was killed)."""

import multiprocessing
import os
import signal
import sys
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index:
            time.sleep(600)  # noqa: TID251  # a slow source
        return torch.zeros(1)


def main(kind):
    # Only a main thread gets PyTorch's own signal on a dead worker; a trainer's thread does not,
    # and waits for the whole of its timeout.
    loader = iter(DataLoader(Slow(), num_workers=2, timeout=600))
    next(loader)
    trainer = threading.Thread(target=next, args=(loader,), name="trainer", daemon=True)
    trainer.start()
    if kind == "dead":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        time.sleep(0.2)  # noqa: TID251  # until the thread waits
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    print("ready", flush=True)  # noqa: T201  # the test reads it
    trainer.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
