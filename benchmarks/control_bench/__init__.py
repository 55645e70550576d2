"""The parts of `benchmarks/control_plane.py`.

processes.py   real jobs on this machine: time, CPU, frames and bytes of one negotiation
simulated.py   thousands of simulated ranks around the real coordinator (simulate.cc)
report.py      what is printed, and how far one coordinator reaches
plot.py        what is drawn
"""
