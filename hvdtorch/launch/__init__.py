"""hvdrun: starts the ranks of a job on this host, forwards their output, ends them together.

    cli        the command line
    config_file, horovodrun_flags  what the command line shares with horovodrun's
    hosts      where ranks run: -H, --hostfile
    environ    the variables each rank gets
    function   `horovod.run`: a function instead of a program, called on every rank
    job        the loop that watches over the ranks until the job is over
    processes  starting, finding and describing processes (Linux)
    output     lines from many ranks to one console, whole and labelled
    companion  a second process: it serves the rendezvous store, and cleans up if hvdrun is killed

Nothing here imports torch, except the companion: starting a job never waits for it.
"""
