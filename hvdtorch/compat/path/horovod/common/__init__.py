"""`horovod.common`: exceptions, process sets and helpers."""
