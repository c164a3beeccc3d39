"""`python -m compat`: the same as the command `gpt2-compat`."""

from compat.cli import main

if __name__ == "__main__":
    main()
