"""`python -m hvdtorch.compat` prints the folder that makes `import horovod` mean hvdtorch."""

from hvdtorch.compat import PATH

print(PATH)
