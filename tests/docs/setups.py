"""What the examples of the documentation take for granted, by the name of their setup."""

INIT = """
import torch
import hvdtorch as hvd
hvd.init()
"""

MODEL = (
    INIT
    + """
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
images, labels = torch.randn(8, 4), torch.arange(8) % 3
loss_function = torch.nn.functional.cross_entropy
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
)

TRAINING = (
    MODEL
    + """
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""
)

# The README's example begins with its own import and init.
SCRIPT = """
import torch
torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
Net = lambda: torch.nn.Linear(4, 3)
loss_function = torch.nn.functional.cross_entropy
epochs = 1
"""

VALUES = INIT + "tensor, config = torch.ones(3), {}"

SETUPS = {"init": INIT, "model": MODEL, "training": TRAINING, "script": SCRIPT, "values": VALUES}
