"""`python -m busy_cluster ...`: freewheel on a cluster where another job holds 1.5 of 2 CPUs."""

import sys

import ray

from freewheel.backends.ray.cluster import Cluster
from freewheel.cli.main import main

_connect = Cluster._connect
_held = []


@ray.remote(num_cpus=1.5)
class Other:
    def is_up(self):
        return True


def connect_and_take(self):
    _connect(self)
    _held.append(Other.remote())
    ray.get(_held[0].is_up.remote())


Cluster._connect = connect_and_take

if __name__ == "__main__":
    sys.exit(main())
