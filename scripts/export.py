"""The same as `gpt2-compat export`."""

import sys

from compat.cli import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
