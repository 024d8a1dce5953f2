"""A Ray cluster of two nodes on this machine, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

NODE = {"num_cpus": 2, "memory": 2 * 10**9, "object_store_memory": 80 * 10**6}


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Two nodes of two cores and 2 GB each; modules of the tests are found by the workers."""
    import ray
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), before]))
    found = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        found.add_node(**NODE)
        found.wait_for_nodes()
        yield found
    finally:
        ray.shutdown()
        found.shutdown()
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def hands() -> list[psutil.Process]:
    """Worker processes of milldam on any node that this process started."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if " ".join(one.cmdline()).startswith("ray::Hand"):
                found.append(one)
    return found
