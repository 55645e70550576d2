"""One rank of a test cluster: `python -m support.rank_main FD`, FD being a pipe to the test
process.

The messages in: (file, module, qualified name, arguments) of a function to call, or nothing at all,
which means "barrier". The answer to each: (ok, result, exception, traceback text).
"""

import ctypes
import faulthandler
import importlib
import pickle
import signal
import sys
import traceback
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any

from support.cluster import module_directory

import hvdtorch as hvd

_PR_SET_PDEATHSIG = 1


def _call(message: bytes) -> Any:
    if not message:
        return hvd.barrier()
    file, module, name, arguments = pickle.loads(message)
    if module_directory(file) not in sys.path:
        sys.path.insert(0, module_directory(file))
    function = reduce(getattr, name.split("."), importlib.import_module(module))
    return function(*arguments)  # type: ignore[operator]


def _answer(message: bytes | None) -> bytes:
    try:
        return pickle.dumps((True, hvd.init() if message is None else _call(message), None, ""))
    except BaseException as error:  # pytest's own failures are no Exception
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))  # some exceptions cannot be rebuilt from their args
        except Exception:
            return pickle.dumps((False, None, None, text))
        return pickle.dumps((False, None, error, text))


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed pytest leaves no ranks
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes the pipe
    pipe = Connection(int(sys.argv[1]))
    pipe.send_bytes(_answer(None))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            break
        pipe.send_bytes(_answer(message))
    hvd.shutdown()


if __name__ == "__main__":
    main()
