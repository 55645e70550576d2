"""Peers that need an interpreter of their own: a companion process beside each rank.

    beside.py    the rank's side: starts a companion, asks it, stops it while others are measured
    main.py      the companion's side: connects, then does what its rank asks
    job.py       how companions become the ranks of one Horovod job, over Gloo or MPI

A companion imports an object (a library under test) and calls its methods on demand, so what is
timed is timed inside the companion. Nothing here imports hvdtorch.
"""
