"""The parts of `benchmarks/training.py`.

models.py        what is trained: networks, batches
trainers.py      who trains: one class per way to reduce gradients
horovod_side.py  Horovod's, inside its companion
reference.py     the same training in one process, to compare losses with
report.py        what is printed, the goals
idle.py          what an initialised and idle hvdtorch costs
plot.py          what is drawn
"""
