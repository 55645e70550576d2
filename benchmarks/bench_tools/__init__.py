"""What the benchmarks share.

ranks.py      the ranks of a run: started with torchrun unless a launcher did
rounds.py     how anything is timed: interleaved rounds, the slowest rank counts
start.py      how the ranks begin a sample at the same moment
machine.py    where and with what a run took place
options.py    parsers of comma lists
outputs.py    the files that a run writes
charts.py     PNG files, if matplotlib is there
namespaces.py two hosts simulated on this machine
"""
