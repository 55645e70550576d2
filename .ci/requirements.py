"""Prints the requirements of pyproject.toml's extras named on the command line, one a line.

pip installs extras only together with the package, and would compile it before its tools exist.
"""

import sys

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
print(*sorted({line for extra in sys.argv[1:] for line in extras[extra]}), sep="\n")
