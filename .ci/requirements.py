"""Prints what the package and its extras named on the command line require, one a line.

pip installs extras only together with the package, and would compile it before its tools exist.
"""

import sys

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
lines = set(project["dependencies"]).union(*(extras[name] for name in sys.argv[1:]))
print(*sorted(lines), sep="\n")
