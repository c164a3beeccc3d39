"""`python -m compat`: the same as the command `gpt2-compat`."""

import sys
from pathlib import Path

import compat

if __name__ == "__main__":
    if Path(str(compat.__file__)).parent != Path(__file__).parent:
        sys.exit(
            f"error: Python imports {compat.__file__} as `compat`, because it comes first in its "
            "search path. Run the command gpt2-compat instead of python -m compat."
        )
    # `python -m` searches the working directory first, where a project may have a `tokenizers.py`.
    # The command gpt2-compat does not search it.
    if not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))
    from compat.cli import main

    main()
