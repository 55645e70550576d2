"""The parts of `benchmarks/collectives.py`.

    cases.py         what is measured: a Case, its input, its result, its bandwidth formulas
    peers.py         who is measured: one class per library
    horovod_peer.py  Horovod, inside its companion
    measure.py       how: a barrier, a sample, microseconds
    report.py        what is printed
    goals.py         which rows have to be how fast
    plot.py          what is drawn

They know nothing of the command line.
"""
