"""`megastable fp8-check`."""

from megastable.cli import main

if __name__ == "__main__":
    main("fp8-check")
