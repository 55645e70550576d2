"""The parts of `benchmarks/collectives.py`.

    cases.py    what is measured: a Case, its input, its result, its bandwidth formulas
    peers.py    who is measured: one class per library
    measure.py  how: interleaved rounds, synchronised starts, the slowest rank counts
    report.py   what is printed: the table, the goals, the JSON file

They know nothing of the command line.
"""
