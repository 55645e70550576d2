"""`horovod.common.elastic`: not available yet."""

from hvdtorch.compat import not_yet

raise ImportError(not_yet(__name__, "elastic training"))
