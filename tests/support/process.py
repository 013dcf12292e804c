"""The process as it was: what programs of the tests change of it is put back behind each of them."""

from __future__ import annotations

import decimal
import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np


@contextmanager
def put_back() -> Iterator[list[warnings.WarningMessage]]:
    """Put the settings of the process back; give the warnings that come meanwhile, each time that they do."""
    limit, interval, folder = sys.getrecursionlimit(), sys.getswitchinterval(), Path.cwd()
    errors, size, generator = np.geterr(), np.getbufsize(), np.random.get_bit_generator()
    thread, name, environment = threading.current_thread(), threading.current_thread().name, dict(os.environ)
    variables, arguments, handlers = os.environ, sys.argv, [signal.getsignal(each) for each in SIGNALS]
    cache: int = mx.set_cache_limit(1 << 30)
    mx.set_cache_limit(cache)
    with decimal.localcontext(), np.printoptions(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            yield told
        finally:
            mx.set_cache_limit(cache)
            mx.enable_compile()
            sys.setrecursionlimit(limit)
            sys.setswitchinterval(interval)
            np.seterr(**errors)
            np.setbufsize(size)
            np.random.set_bit_generator(generator)
            thread.name = name
            os.environ, sys.argv = variables, arguments
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            for each, handler in zip(SIGNALS, handlers, strict=True):
                signal.signal(each, handler)
            logging.disable(logging.NOTSET)
            gc.enable()


SIGNALS = [signal.SIGINT, *([signal.SIGUSR1, signal.SIGALRM] if hasattr(signal, "SIGALRM") else [])]
