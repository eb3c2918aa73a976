"""A Ray driver with actors that are blocked in known ways, and healthy ones beside them.

Prints one JSON object (class of the actor -> pid) when every call is under way, and waits until
its standard input ends.
"""

import json
import os
import sys
import time

import ray
from ray_rollouters import CLASSES


def main():
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=1 << 27)
    actors = {cls.__name__: ray.remote(num_cpus=0)(cls).remote() for cls in CLASSES}
    pids = {name: ray.get(actor.pid.remote()) for name, actor in actors.items()}
    for actor in actors.values():
        actor.rollout.remote()
        actor.do_validate.remote()
    time.sleep(1.5)  # noqa: TID251  # until the calls have reached what blocks them
    print(json.dumps({"driver": os.getpid(), **pids}), flush=True)  # noqa: T201  # the test reads it
    sys.stdin.read()
    ray.shutdown()


main()
