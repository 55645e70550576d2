"""Collectives before `init()` and after `shutdown()`."""

from support.scripts import run_script

SCRIPT = """
    import torch
    import hvdtorch as hvd

    def refused():
        for call in (
            lambda: hvd.allreduce(torch.ones(1)),
            lambda: hvd.grouped_allreduce_async_([torch.ones(1)]),
            lambda: hvd.allgather(torch.ones(1)),
            lambda: hvd.broadcast(torch.ones(1), 0),
            lambda: hvd.alltoall(torch.ones(1)),
            lambda: hvd.reducescatter(torch.ones(1)),
            lambda: hvd.grouped_reducescatter_async([torch.ones(1)]),
            lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "x", hvd.Sum),
            lambda: hvd.barrier(),
            lambda: hvd.broadcast_object({}),
            lambda: hvd.allgather_object({}),
            lambda: hvd.broadcast_parameters({}, 0),
        ):
            try:
                call()
            except hvd.HorovodInternalError as error:
                assert "hvd.init()" in str(error), error
            else:
                raise AssertionError("not refused")

    refused()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    hvd.shutdown()
    refused()
    print("fine")
"""


def test_alone_and_with_others():
    assert run_script(1, SCRIPT).outputs == ["fine\n"]
    assert run_script(2, SCRIPT).outputs == ["fine\n", "fine\n"]
