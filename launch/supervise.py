"""`megastable supervise`, and with the word status before a run `megastable status`."""

import sys

from megastable.cli import main

if __name__ == "__main__":
    main() if sys.argv[1:2] == ["status"] else main("supervise")
