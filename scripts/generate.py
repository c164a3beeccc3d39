"""The same as `gpt2-compat generate`."""

import sys

from compat.cli import main

if __name__ == "__main__":
    main(["generate", *sys.argv[1:]])
