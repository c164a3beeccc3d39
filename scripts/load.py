"""The same as `gpt2-compat load`."""

import sys

from compat.cli import main

if __name__ == "__main__":
    main(["load", *sys.argv[1:]])
