"""Worker threads whose torch operations use one thread each.

A pool of Python threads, each in its own tile, is how this tool uses the cores of a CPU: torch's
own threads fork and join for every operation, exchange the data between cores, and after each one
spin for milliseconds on a core that reading and writing could use.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_LOCK = threading.Lock()


def single_threaded(workers: int, name: str) -> ThreadPoolExecutor:
    """A pool of `workers` threads, born already, whose torch operations use one thread each.

    `torch.set_num_threads` holds for the calling thread and for threads yet to be born, so once
    every worker has called it the value is put back for the latter.
    """
    born = threading.Barrier(workers)
    with _LOCK:
        own = torch.get_num_threads()
        pool = ThreadPoolExecutor(workers, name, torch.set_num_threads, (1,))
        list(pool.map(lambda _: born.wait(), range(workers)))
        torch.set_num_threads(own)
    return pool


def own_threads() -> int:
    """`torch.get_num_threads()`, but never a value that `single_threaded` holds for a moment.

    A thread takes the process's number when it first asks, and then keeps it.
    """
    with _LOCK:
        return torch.get_num_threads()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let the calling thread's torch operations use one thread each."""
    own = own_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(own)
